"""What the measurement of schemas and tools counts as well-formed and as right; each task can be done right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skydraft.evaluation.tasks import checks

jsonschema = pytest.importorskip("jsonschema")
BENCH = Path(__file__).parent.parent / "bench"
CALL = {"name": "f", "arguments": {"a": 1}}


def lines(name: str) -> list[Any]:
    return [json.loads(line) for line in (BENCH / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        '好的：\n```json\n{"name": "f",\n "arguments": {"a": 1}}\n```\n这样。',
        '{"name": "f", "parameters": {"a": 1}}',
        '{"name": "g", "arguments": {}} {"name": "f", "arguments": "{\\"a\\": 1}"}',
        '{f} {"name": "f", "arguments": {"a": 1}}',
    ],
)
def test_a_call_is_found_however_it_is_wrapped(text: str) -> None:
    assert checks.read_call(text, ("f",)) == CALL


@pytest.mark.parametrize("text", ["", "f(a=1)", '{"name": "f"}', '{"name": "g", "arguments": {}}', '{"name": "f"'])
def test_what_is_no_call_is_none(text: str) -> None:
    assert checks.read_call(text, ("f",)) is None


def test_a_text_that_does_not_fit_is_complained_of() -> None:
    schema = {"type": "object", "properties": {"at": {"type": "string", "format": "date-time"}}}
    assert checks.complaint('{"at": "2026-03-01T09:00:00+08:00"}', schema) == ""
    assert checks.complaint('{"at": "2026-13-01T09:00:00Z"}', schema) and checks.complaint('{"at": 1}', schema)
    assert checks.complaint("39.9", {"multipleOf": 0.1}) == "" != checks.complaint("39.95", {"multipleOf": 0.1})
    assert checks.complaint('{"at": "2026', schema).startswith("no JSON")


def test_there_are_60_tasks_whose_answers_fit() -> None:
    sets = {line["set"]: {tool["name"]: tool for tool in line["tools"]} for line in lines("structured_tools.jsonl")}
    rows = lines("structured_tasks.jsonl")
    assert len(rows) == 60 and len({row["id"] for row in rows}) == 60 and sum("set" in row for row in rows) == 30
    for row in rows:
        if "set" in row:
            parameters = sets[row["set"]][row["answer"]["name"]]["parameters"]
            assert set(row["answer"]["arguments"]) == set(parameters["properties"])
            jsonschema.validate(row["answer"]["arguments"], parameters)
        else:
            jsonschema.validate(row["answer"], row["schema"])


def test_task_files_judge_right_answers_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import tasks
    from skydraft.evaluation.tasks.sets import read_tasks

    monkeypatch.setattr("sys.argv", ["tasks", str(tmp_path)])
    assert tasks.main() == 0
    truth = Path(__file__).parent.parent / "data" / "speech_zh_heldout" / "truth.jsonl"
    said = {line["id"]: line["references"] for line in map(json.loads, truth.read_text(encoding="utf-8").splitlines())}
    entries = read_tasks(f"{tmp_path}/schemas.jsonl,{tmp_path}/captions.jsonl").prompts
    assert len(entries) == 120
    for entry in entries:
        assert entry.task
        check: Any = entry.task.check
        answers = said[entry.id.rpartition("/")[2]] if entry.audio else [json.dumps(check.answer, ensure_ascii=False)]
        assert [check.judge(answer).score for answer in answers] == [1] * len(answers)
        assert check.judge("不知道").score == 0 and bool(entry.task.grammar) != bool(entry.audio)
