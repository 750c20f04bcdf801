"""The tables of figures in README.md and docs/, each out of the file that its command wrote.

    python -m bench figures     puts what the files say into the tables of the pages

`sentences` are those of the pages that name such a figure; tests/docs/test_figures.py holds both to the files, and lets
no page have a figure beside them.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from skydraft.lab.evaluation.findings import Findings
from skydraft.lab.evaluation.records import read_records

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
STREAMS = ("cloud", "lossless")  # modes whose text is one call
NAMES = {
    "auto;gate=calibrated:0.9": "auto --gate calibrated:0.9", "auto;k=12;hand-back=0": "auto --k 12 --hand-back 0",
    "lossless;k=5": "lossless --k 5", "lossless;k=6": "lossless --k 6",
}  # fmt: skip
ORDER = ("edge", "fluency", "quality", "auto", *list(NAMES)[:3], "lossless", "cloud")
KINDS = {"zh": "Chinese", "everyday": "everyday", "code": "code", "zh-long": "long Chinese", "edits": "edits"}
GATED_KINDS = ("zh", "code", "edits")


def read(name: str) -> Any:
    return json.loads((DOCS / name).read_text(encoding="utf-8"))


LEARNED = read("learned/figures.json")
FILES = "link gated_link race_q4_0 race_q4_k_m vllm devices everyday speech presets"
SUMMARY, LINK, GATED, RACE_0, RACE_K, VLLM, DEVICES, EVERYDAY, SPEECH, PRESETS = (
    read(f"{name}.json") for name in ("report-zh-dev/summary", *(f"figures/{name}" for name in FILES.split()))
)


@cache
def findings() -> Findings:
    """The committed answers."""
    return Findings(read_records(DOCS / "report-zh-dev/records.jsonl"))


@cache
def texts_of(mode: str) -> dict[str, tuple[int, ...]]:
    """The tokens of each prompt's answer, both models in one process."""
    (cases,) = (each.cases for each in findings().settings if each.mode.name == mode)
    return {case.prompt.id: case.generation.token_ids for (case,) in cases}


def same(mode: str) -> str:
    """How many answers are the target's, token for token."""
    theirs, mine = texts_of("cloud"), texts_of(mode)
    return str(sum(mine[prompt] == theirs[prompt] for prompt in theirs))


def setting(mode: str) -> dict[str, Any]:
    """What one process measured."""
    (found,) = (each for each in SUMMARY["settings"] if each["mode"] == mode)
    return dict(found)


def kept(mode: str, measure: str) -> float:
    return float(setting(mode)["measures"][measure]["value"])


def here(mode: str) -> float:
    """Speed in one process."""
    return float(setting(mode)["speed_over"]["cloud"]["value"])


def far(mode: str, rtt_ms: float, kind: str) -> float | None:
    """Tokens a second in units of the stream's, with the target on a machine of its own, 45 ms a token."""
    for point in (LINK if mode == "lossless" else GATED)["points"]:
        is_it = (point["rtt_ms"], point["kind"], point["target_ms"]) == (rtt_ms, kind, 45.0)
        if is_it and (way := {"cloud": "stream"}.get(mode, mode)) in point["ways"]:
            return float(point["ways"][way]["speed"])
    return None


def over_a_link() -> list[str]:
    rows = []
    for step_ms, target_ms, rtt_ms in sorted({(p["step_ms"], p["target_ms"], p["rtt_ms"]) for p in LINK["points"]})[
        ::-1
    ]:
        of = {p["kind"]: p["ways"] for p in LINK["points"] if (p["step_ms"], p["rtt_ms"]) == (step_ms, rtt_ms)}
        cells = [f"{of[kind]['lossless']['speed']:.2f}" if kind in of else "–" for kind in KINDS]
        rows.append([f"{step_ms:g} and {target_ms:g} ms, {rtt_ms:g} ms", *cells])
    return table(("draft and target, round trip", *KINDS.values()), rows)


def two_engines() -> list[str]:
    rows = []
    for name, found in (("Q4_0", RACE_0), ("Q4_K_M", RACE_K)):
        of = {point["kind"]: point["ways"]["lossless"] for point in found["points"]}
        costs = " · ".join(f"{found['costs'][f't_v({num})']:.2f}" for num in (2, 4, 8))
        rows.append([name, costs, *(f"{of[kind]['speed']:.2f} ({of[kind]['whole']:.2f})" for kind in of)])
    kinds = [KINDS[point["kind"]] for point in RACE_0["points"]]
    return table(("weights of both", "a forward of 2 · 4 · 8 rows", *kinds), rows)


def vllm_with_drafts() -> list[str]:
    ways: dict[str, dict[str, Any]] = {}
    for point in VLLM["points"]:
        ways.setdefault(point["way"], {})[KINDS[point["kind"]]] = point
    rows = [
        [way, *(f"{each['speed']:.2f} ({each['forwards']:.2f})" for each in of.values()),
         f"{sum(each['same'] for each in of.values())} of {sum(each['texts'] for each in of.values())}"]
        for way, of in ways.items()
    ]  # fmt: skip
    return table(("stream = 1", *ways["race"], "same text"), rows)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return [f"| {' | '.join(cells)} |".replace(" --- ", "---").replace("| ---", "|---") for cells in lines]


def code(mode: str) -> str:
    return f"`{NAMES.get(mode, mode)}`"


def calls(mode: str, value: float) -> str:
    return "one a text" if mode in STREAMS else f"{value:.3f}"


def what_a_mode_keeps() -> list[str]:
    rows = []
    for mode in ORDER:
        if mode in ("fluency", "quality"):  # measured again since
            agreement, same_answers, written, asked = preset_cells(mode)
            num_rows, speed = "–", PRESETS[mode]["speed"]
        else:
            agreement, same_answers, written, asked = cells_of(mode)
            num_rows, speed = f"{kept(mode, 'target_rows_per_token'):.2f}", here(mode)
        rows.append([code(mode), agreement, same_answers, asked, written, num_rows, f"{speed:.2f}"])
    head = ("agreement", "same answers", "calls a token", "written", "rows a token", "speed, `cloud` = 1")
    return table(("62 short prompts", *head), rows)


def cells_of(mode: str) -> list[str]:
    names = ("target_agreement", "target_written_per_token", "cloud_calls_per_token")
    agreement, written, asked = (kept(mode, name) for name in names)
    return [f"{agreement:.3f}", same(mode), f"{written:.2f}", calls(mode, asked)]


def what_it_keeps_of_everyday_questions() -> list[str]:
    rows = []
    for mode in ("auto", "answers"):
        agreement, *costs = (EVERYDAY[mode][name]["value"] for name in ("agreement", "calls", "written", "rows"))
        same_answers = str(EVERYDAY[mode]["same"]["value"])
        rows.append([code(mode), f"{agreement:.3f}", same_answers, *(f"{value:.3f}" for value in costs)])
    head = ("agreement", "same answers", "calls a token", "written", "rows a token")
    return table(("55 everyday questions", *head), rows)


def gated_over_a_link() -> list[str]:
    rows = []
    for rtt_ms in (20, 80):
        rows.append([f"`auto`, {rtt_ms} ms", *(f"{far('auto', rtt_ms, kind):.2f}" for kind in GATED_KINDS)])
    return table(("25 and 45 ms, stream = 1", *(KINDS[kind] for kind in GATED_KINDS)), rows)


def devices_of(texts: str, num: int, mode: str) -> dict[str, float]:
    """What so many devices got and asked for in this mode."""
    wanted = (texts, num, mode)
    (point,) = (each for each in DEVICES["points"] if (each["texts"], each["clients"], each["mode"]) == wanted)
    return dict(point)


def carried(texts: str, num: int, mode: str) -> float:
    """Tokens a second of so many devices, in units of as many streams."""
    mine, streams = (devices_of(texts, num, each) for each in (mode, "cloud"))
    return mine["tokens"] / mine["seconds"] / (streams["tokens"] / streams["seconds"])


def headline(head: str, kinds: Sequence[str]) -> list[str]:
    """Of README: `lossless` beside the stream of the same model, over two links and at a vLLM."""
    race = {point["kind"]: point for point in VLLM["points"] if point["way"] == "race"}
    rows = []
    for kind, name in zip(KINDS, kinds, strict=True):
        speeds = [far("lossless", rtt_ms, kind) or 0.0 for rtt_ms in (20, 80)]
        there = race[kind]
        cells = [f"{speed:.2f}" for speed in (*speeds, there["speed"])]
        rows.append([name, *cells, f"{there['same']} / {there['texts']}"])
    return table(head.split(" | "), rows)


def taught(head: str, names: Sequence[str]) -> list[str]:
    """Of README: right answers of the draft model before and after it learned a task, and of the target."""
    rows = []
    for task_set, name in zip(("zh-extract", "zh-words", "arithmetic"), names, strict=True):
        right = (LEARNED[task_set][who]["right"]["value"] for who in ("edge", "edge-learned", "cloud"))
        rows.append([name, *(f"{value:.2f}" for value in right)])
    return table(head.split(" | "), rows)


def what_clips_keep(head: str, once: str) -> list[str]:
    rows = []
    for mode, found in SPEECH["here"].items():
        asked = once if mode == "cloud" else f"{found['cloud_calls_per_token']:.3f}"
        accepted = f"{found['acceptance_rate']:.3f}" if found["acceptance_rate"] else "–"
        right = [f"{found[name]:.3f}" for name in ("captions", "attributes")]
        rows.append([code(mode), *right, asked, accepted, f"{found['target_passes_per_token']:.3f}"])
    return table(head.split(" | "), rows)


def speech_over_a_link() -> list[str]:
    """`edge` and `fluency` send nothing."""
    rows = []
    for key, mode in ((rtt, mode) for rtt in ("20 ms", "80 ms") for mode in ("cloud", "quality", "lossless")):
        found = SPEECH[key][mode]
        asked = "one a text" if mode == "cloud" else f"{found['cloud_calls_per_token']:.3f}"
        speed = found["tokens_per_s"] / SPEECH[key]["cloud"]["tokens_per_s"]
        cells = [f"{found['captions']:.3f}", asked, f"{found['ttft_ms']:.0f}", f"{found['bytes_up'] / 1e3:.1f}"]
        rows.append([f"{key}, {code(mode)}", *cells, f"{speed:.2f}"])
    head = ("right captions", "calls a token", "first token, ms", "kB up a clip", "speed, `cloud` = 1")
    return table(("60 clips, round trip", *head), rows)


def memory() -> list[str]:
    rows = [[name, *(f"{each:.1f}" for each in sizes)] for name, sizes in SPEECH["memory, GB"].items()]
    return table(("GB", "`float32`", "`bfloat16`", "`int8`", "`int4`"), rows)


def speech_tables(clips: str, once: str) -> tuple[Callable[[], list[str]], ...]:
    return memory, partial(what_clips_keep, clips, once)


def preset_cells(mode: str) -> list[str]:
    found = PRESETS[mode]
    share = [f"{found['target_agreement']:.3f}", str(found["same"]), f"{found['target_written_per_token']:.2f}"]
    return [*share, calls(mode, found["cloud_calls_per_token"])]


def sentences() -> Iterator[tuple[str, str]]:
    """Page and words of each figure that stands outside of tables."""
    same_in_auto, same_in_answers = (EVERYDAY[mode]["same"]["value"] for mode in ("auto", "answers"))
    yield "docs/modes.md", f"{same_in_auto} answers of `auto` and {same_in_answers} of `answers`"
    page, lossless = "docs/measuring.md", setting("lossless")["speed_over"]["cloud"]
    yield page, f"{lossless['value']:.2f} is within the noise ({lossless['low']:.2f} to {lossless['high']:.2f})."
    for mode in ("auto", "auto;gate=calibrated:0.9"):
        short, long = (f"{carried(texts, 16, mode):.2f}" for texts in ("short", "long"))
        yield page, f"{code(mode)}: {short} on short texts, {long} on long ones"
    ways = [point["ways"] for point in LINK["points"] if (point["target_ms"], point["rtt_ms"]) == (45.0, 20.0)]
    up, down = ([round(way["lossless"][name]) for way in ways] for name in ("bytes_up", "bytes_down"))
    yield page, f"a token takes {min(up)} to {max(up)} bytes up and {min(down)} to {max(down)} bytes down."
    whole = [way["first text"]["whole"] for way in ways]
    yield page, f"a first text, counted from the request, has {min(whole):.2f} to {max(whole):.2f}"


TABLES: dict[str, tuple[Callable[[], list[str]], ...]] = {
    "README.md": (
        partial(
            headline,
            "large model = 1 | over 20 ms | over 80 ms | a vLLM over 20 ms | same text with vLLM",
            ("Chinese answers", "everyday questions", "code", "long Chinese texts", "edits"),
        ),
        partial(
            taught,
            "150 tasks, right answers | small model | after it learned | large model",
            ("facts of Chinese notes as JSON", "Chinese words", "arithmetic"),
        ),
    ),
    "README.zh-CN.md": (
        partial(
            headline,
            "大模型流式输出 = 1 | 20 ms 链路 | 80 ms 链路 | vLLM，20 ms 链路 | vLLM 文字相同的段数",
            ("中文短答", "日常问题", "代码", "中文长文", "改写"),
        ),
        partial(taught, "150 道题，答对比例 | 小模型 | 学习之后 | 大模型", ("从中文便条提取 JSON", "中文词语", "算术")),
    ),
    "docs/speech.md": (
        *speech_tables(
            "60 clips | right captions | right attributes | calls a token | acceptance | passes a token", "one a text"
        ),
        speech_over_a_link,
    ),
    "docs/speech.zh.md": speech_tables(
        "60 段录音 | 描述全对 | 属性准确率 | 调用次数 / token | 接受率 | 大模型前向次数 / token", "每段一次"
    ),
    "docs/measuring.md": (
        what_a_mode_keeps,
        what_it_keeps_of_everyday_questions,
        over_a_link,
        gated_over_a_link,
        two_engines,
        vllm_with_drafts,
    ),
}


def tables(page: str) -> Iterator[list[str]]:
    for make in TABLES.get(page, ()):
        yield make()


def with_tables(page: str, text: str) -> str:
    """The text of a page with its tables as the files have them; a table is found by its head. Raises ValueError."""
    for lines in tables(page):
        begin = text.index(lines[0] + "\n")
        end = text.index("\n\n", begin)
        text = text[:begin] + "\n".join(lines) + text[end:]
    return text


def main() -> None:
    for page in TABLES:
        path = ROOT / page
        path.write_text(with_tables(page, path.read_text(encoding="utf-8")), encoding="utf-8")
