"""Tasks through whole comparisons of toys: verdicts, the same after a kill, and what the page says."""

import re
from pathlib import Path
from typing import Any

import pytest

from skydraft.errors import OptionError
from skydraft.lab.evaluation.comparison import ComparisonRequest
from skydraft.lab.evaluation.findings import Findings
from skydraft.lab.evaluation.records import Records
from skydraft.lab.evaluation.report.page import write_report
from skydraft.lab.evaluation.summary import summarize
from skydraft.lab.tasks.sets import read_tasks
from tests.cli.conftest import Invoke, invoke  # noqa: F401

from .. import lines, pairs

NUM_TASKS, LEN = 12, 16


def run(file: Path, out: Path, **given: Any) -> Records:
    modes = lines.modes("edge,cloud,lossless;k=3,quality", LEN)
    request = ComparisonRequest(read_tasks(str(file)), modes, **({"scores": False} | given))
    return pairs.compared(request, out, pairs.pair(0.3))[0]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Tasks that each want a character that some texts of toys have, with limits of their own."""
    check = {"kind": "regex", "pattern": "的|一|化|平"}
    texts = enumerate(pairs.prompts(3, NUM_TASKS))
    made = [{"id": str(n), "prompt": text, "check": check, "max_new_tokens": LEN + n} for n, text in texts]
    made.append({"id": "system", "check": {"kind": "number", "answer": 7}, "grammar": "regex:[0-9]",
                 "messages": [{"role": "system", "content": "数"}, {"role": "user", "content": "几"}]})  # fmt: skip
    return lines.jsonl(tmp_path / "toys.jsonl", *made)


def test_verdicts_are_of_the_texts_and_a_killed_run_goes_on_to_the_same(file: Path, tmp_path: Path) -> None:
    whole = run(file, tmp_path / "whole", scores=True)
    assert {line.prompt for line in whole.scores} == {line.prompt for line in whole.generations}
    assert max(len(line.token_ids) for line in whole.generations) > LEN + 1
    last = [line.text for line in whole.generations if line.prompt == "toys/system"]
    assert all(re.fullmatch("[0-9]", text) for text in last)
    verdicts = {(line.prompt, line.token_ids): line for line in whole.verdicts}
    assert len(verdicts) == len(whole.verdicts) > 2 * NUM_TASKS
    for line in whole.generations[: 4 * NUM_TASKS]:
        assert verdicts[line.prompt, line.token_ids].score == bool(re.search("的|一|化|平", line.text))

    content = (tmp_path / "whole" / "records.jsonl").read_bytes()
    first_verdict = content.index(b'{"kind":"verdict"')
    for cut in (first_verdict - 5, first_verdict, first_verdict + 30, len(content) - 1):
        out = tmp_path / f"cut{cut}"
        out.mkdir()
        (out / "records.jsonl").write_bytes(content[:cut])
        again = run(file, out)
        assert {(line.prompt, line.token_ids): line for line in again.verdicts} == verdicts
        assert len(again.generations) == len(whole.generations)
    assert run(file, tmp_path / "whole", scores=True) == whole


def test_texts_that_a_killed_run_did_not_judge_are_counted(
    file: Path, tmp_path: Path, invoke: Invoke  # noqa: F811
) -> None:  # fmt: skip
    records = run(file, tmp_path / "out")
    path = tmp_path / "out" / "records.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b'{"kind":"verdict"')])
    status, _, err = invoke("report", str(tmp_path / "out"))
    assert status == 0 and f"without a verdict, which do not count: {len(records.verdicts)}." in err
    assert run(file, tmp_path / "out").verdicts == records.verdicts
    assert "without a verdict" not in invoke("report", str(tmp_path / "out"))[2]


def test_lossless_scores_what_cloud_scores_and_the_page_says_it_all(file: Path, tmp_path: Path) -> None:
    records = run(file, tmp_path / "out")
    summary = summarize(Findings(records))
    (of,) = summary.tasks
    modes = {mode.mode: mode for mode in of.modes}
    assert of.num_tasks == NUM_TASKS + 1
    assert modes["lossless;k=3"].score == modes["cloud"].score
    assert modes["cloud"].written.value == 1 and modes["edge"].calls.value == 0
    by_set = {setting.mode: setting.measures["task_score"].value for setting in summary.settings}
    assert by_set == {name: mode.score.value for name, mode in modes.items()}

    assert write_report(Findings(records), tmp_path / "out") == summary
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Tasks: toys" in page and "Score against cost: toys" in page
    for mode in of.modes:
        assert f"{mode.score.value:.3f}" in page
    assert 1 <= page.count("<details data-id=") <= 6  # of tasks a few


def test_code_is_run_only_where_that_was_allowed(file: Path, tmp_path: Path) -> None:
    lines.jsonl(file, {"prompt": "写", "check": {"kind": "python", "tests": ""}})
    with pytest.raises(OptionError, match="run code") as error:
        run(file, tmp_path / "out")
    assert "--run-code" in error.value.line and not (tmp_path / "out").exists()
