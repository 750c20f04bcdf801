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


FILES = "link gated_link race_q4_0 race_q4_k_m vllm tasks long devices everyday speech presets"
LEARNED = read("learned/figures.json")
SUMMARY, LINK, GATED, RACE_0, RACE_K, VLLM, TASKS, LONG, DEVICES, EVERYDAY, SPEECH, PRESETS = (
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


def what_the_link_carries() -> list[str]:
    rows = []
    for point in LINK["points"]:
        if (point["target_ms"], point["rtt_ms"]) == (45.0, 20.0):
            ways, race = point["ways"], point["ways"]["lossless"]
            speeds = [ways["first text"]["whole"], ways["rounds"]["speed"], ways["edge"]["speed"]]
            counts = [f"{race[name]:.2f}" for name in ("forwards", "sent", "accepted")]
            traffic = [f"{race[name]:.0f}" for name in ("bytes_up", "bytes_down")]
            rows.append([KINDS[point["kind"]], *(f"{each:.2f}" for each in speeds), *counts, *traffic])
    names = (
        "first text",
        "rounds, best `--k`",
        "`edge`",
        "forwards a token",
        "drafts sent a token",
        "accepted of judged",
    )
    return table(("25 and 45 ms, 20 ms", *names, "bytes up a token", "bytes down"), rows)


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


def far_cell(mode: str, rtt_ms: float, kinds: Iterable[str] = GATED_KINDS) -> str:
    found = [far(mode, rtt_ms, kind) for kind in kinds]
    return " · ".join(f"{each:.2f}" for each in found if each is not None) or "–"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return [f"| {' | '.join(cells)} |".replace(" --- ", "---").replace("| ---", "|---") for cells in lines]


def code(mode: str) -> str:
    return f"`{NAMES.get(mode, mode)}`"


def calls(mode: str, value: float) -> str:
    return "one a text" if mode in STREAMS else f"{value:.3f}"


def what_a_mode_keeps() -> list[str]:
    names = ("target_agreement", "cloud_calls_per_token", "target_written_per_token", "target_rows_per_token")
    rows = []
    for mode in ORDER:
        agreement, asked, written, num_rows = (kept(mode, name) for name in names)
        cells = [f"{agreement:.3f}", same(mode), calls(mode, asked), f"{written:.3f}", f"{num_rows:.2f}"]
        rows.append([code(mode), *cells])
    head = ("agreement", "same answers", "calls a token", "written by the target", "rows a token")
    return table(("62 short prompts", *head), rows)


def what_it_keeps_of_long_texts() -> list[str]:
    rows = []
    for mode in ("auto", "auto;gate=calibrated:0.9", "auto;k=12;hand-back=0"):
        found = [LONG[mode][name]["value"] for name in ("agreement", "calls", "written", "rows")]
        rows.append([code(mode), *(f"{value:.3f}" for value in found[:3]), f"{found[3]:.2f}"])
    return table(("40 long texts", "agreement", "calls a token", "written by the target", "rows a token"), rows)


def what_it_keeps_of_everyday_questions() -> list[str]:
    rows = []
    for mode in ("quality", "answers", "auto"):
        agreement, *costs = (EVERYDAY[mode][name]["value"] for name in ("agreement", "calls", "written", "rows"))
        same_answers = str(EVERYDAY[mode]["same"]["value"])
        rows.append([code(mode), f"{agreement:.3f}", same_answers, *(f"{value:.3f}" for value in costs)])
    head = ("agreement", "same answers", "calls a token", "written by the target", "rows a token")
    return table(("55 everyday questions", *head), rows)


def how_fast() -> list[str]:
    rows = ([code(mode), f"{here(mode):.2f}", *(far_cell(mode, rtt_ms) for rtt_ms in (20, 80))] for mode in ORDER)
    return table(("speed, `cloud` = 1", "both on one machine", "20 ms", "80 ms"), rows)


def devices_of(texts: str, num: int, mode: str) -> dict[str, float]:
    """What so many devices got and asked for in this mode."""
    wanted = (texts, num, mode)
    (point,) = (each for each in DEVICES["points"] if (each["texts"], each["clients"], each["mode"]) == wanted)
    return dict(point)


def carried(texts: str, num: int, mode: str) -> float:
    """Tokens a second of so many devices, in units of as many streams."""
    mine, streams = (devices_of(texts, num, each) for each in (mode, "cloud"))
    return mine["tokens"] / mine["seconds"] / (streams["tokens"] / streams["seconds"])


def how_many_devices() -> list[str]:
    counts = sorted({point["clients"] for point in DEVICES["points"]})
    rows = []
    for texts, mode in dict.fromkeys((point["texts"], point["mode"]) for point in DEVICES["points"]):
        here = [each["clients"] for each in DEVICES["points"] if (each["texts"], each["mode"]) == (texts, mode)]
        most = devices_of(texts, max(here), mode)
        speeds = [f"{carried(texts, num, mode):.2f}" if num in here else "–" for num in counts]
        shares = [f"{most[name] / most['tokens']:.2f}" for name in ("rows", "forwards", "written")]
        rows.append([texts, code(mode), *speeds, f"{most['agreement']:.3f}", *shares])
    names = (f"{num} device{'s' * (num > 1)}" for num in counts)
    return table(("texts", "`--mode`", *names, "agreement", "rows a token", "forwards a token", "written"), rows)


def right_answers() -> list[str]:
    rows = []
    for task_set, name in (("arithmetic", "arithmetic"), ("zh-extract", "extraction")):
        for mode, found in TASKS[task_set].items():
            closed = f"{found['closed']['value']:.2f}"
            if "low" in found["closed"]:
                closed += f" [{found['closed']['low']:.2f}, {found['closed']['high']:.2f}]"
            rows.append(
                [
                    name,
                    code(mode),
                    f"{found['right']['value']:.2f}",
                    closed,
                    calls(mode, found["calls"]["value"]),
                    f"{found['written']['value']:.2f}",
                ]
            )
    return table(("150 tasks each", "`--mode`", "right", "gap closed", "calls a token", "written by the target"), rows)


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


def speech_over_a_link(head: str, once: str) -> list[str]:
    rows = []
    for key, (mode, found) in ((rtt, each) for rtt in ("20 ms", "80 ms") for each in SPEECH[rtt].items()):
        asked = once if mode == "cloud" else f"{found['cloud_calls_per_token']:.3f}"
        speed = found["tokens_per_s"] / SPEECH[key]["cloud"]["tokens_per_s"]
        cells = [f"{found['captions']:.3f}", asked, f"{found['ttft_ms']:.0f}", f"{found['bytes_up'] / 1e3:.1f}"]
        rows.append([f"{key}, {code(mode)}", *cells, f"{speed:.2f}"])
    return table(head.split(" | "), rows)


def memory() -> list[str]:
    rows = [[name, *(f"{each:.1f}" for each in sizes)] for name, sizes in SPEECH["memory, GB"].items()]
    return table(("GB", "`float32`", "`bfloat16`", "`int8`", "`int4`"), rows)


def speech_tables(clips: str, link: str, once: str) -> tuple[Callable[[], list[str]], ...]:
    return memory, partial(what_clips_keep, clips, once), partial(speech_over_a_link, link, once)


def presets() -> list[str]:
    rows = []
    for mode, found in PRESETS.items():
        share = [f"{found['target_agreement']:.3f}", str(found["same"]), f"{found['target_written_per_token']:.2f}"]
        rows.append([code(mode), *share, calls(mode, found["cloud_calls_per_token"]), f"{found['speed']:.2f}"])
    head = ("agreement", "same answers", "written by the target", "calls a token", "speed, `cloud` = 1")
    return table(("62 short prompts, presets of today", *head), rows)


def sentences() -> Iterator[tuple[str, str]]:
    """Page and words of each figure that stands outside of tables."""
    same_in_auto, same_in_answers = (EVERYDAY[mode]["same"]["value"] for mode in ("auto", "answers"))
    yield "docs/modes.md", f"{same_in_auto} answers of `auto` and {same_in_answers} of `answers`"
    page, lossless = "docs/measuring.md", setting("lossless")["speed_over"]["cloud"]
    yield page, f"That it has {lossless['value']:.2f} on one machine"
    yield page, f"the interval is {lossless['low']:.2f} to {lossless['high']:.2f}."
    long = {mode: (LONG[mode]["agreement"]["value"], LONG[mode]["rows"]["value"]) for mode in LONG if "auto" in mode}
    names = ("target_agreement", "target_rows_per_token")
    short = {mode: (kept(mode, names[0]), kept(mode, names[1])) for mode in ORDER if mode not in STREAMS}
    for texts, found in (("long texts", long), ("short prompts", short)):
        best = {
            least: min((mode for mode in found if found[mode][0] >= least), key=lambda mode: found[mode][1])
            for least in (0.95, 0.9)
        }
        yield (
            page,
            (
                f"On the {texts} {code(best[0.95])} computes fewest rows at an agreement of at least 0.95 "
                f"({found[best[0.95]][1]:.2f} of the stream's), and {code(best[0.9])} at least 0.9 "
                f"({found[best[0.9]][1]:.2f})."
            ),
        )


TABLES: dict[str, tuple[Callable[[], list[str]], ...]] = {
    "README.md": (
        partial(
            headline,
            "large model = 1 | over 20 ms | over 80 ms | a vLLM over 20 ms | same text there",
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
            "大模型流式输出 = 1 | 20 ms 链路 | 80 ms 链路 | vLLM，20 ms 链路 | 文本相同（vLLM）",
            ("中文短答", "日常问题", "代码", "中文长文", "改写"),
        ),
        partial(taught, "150 道题，答对比例 | 小模型 | 学习之后 | 大模型", ("从中文便条提取 JSON", "中文词语", "算术")),
    ),
    "docs/speech.md": speech_tables(
        "60 clips | right captions | right attributes | calls a token | acceptance | passes a token",
        "60 clips, round trip | right captions | calls a token | first token, ms | kB up a clip | speed, `cloud` = 1",
        "one a text",
    ),
    "docs/speech.zh.md": speech_tables(
        "60 段录音 | 描述全对 | 属性对 | 每 token 调用 | 接受率 | 每 token 前向",
        "60 段录音，往返时延 | 描述全对 | 每 token 调用 | 首 token，ms | 每段上行 kB | 速度，`cloud` = 1",
        "每段一次",
    ),
    "docs/measuring.md": (
        presets,
        what_a_mode_keeps,
        what_it_keeps_of_everyday_questions,
        what_it_keeps_of_long_texts,
        over_a_link,
        what_the_link_carries,
        two_engines,
        vllm_with_drafts,
        how_fast,
        how_many_devices,
        right_answers,
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
