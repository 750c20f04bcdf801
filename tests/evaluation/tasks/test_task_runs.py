"""Tasks through a whole comparison of toys: verdicts, the same after a kill, and what the page says."""

import re
from pathlib import Path
from typing import Any

import pytest

from skydraft.lab.evaluation.comparison import ComparisonRequest
from skydraft.lab.evaluation.findings import Findings
from skydraft.lab.evaluation.records import Records, VerdictLine
from skydraft.lab.evaluation.report.page import write_report
from skydraft.lab.evaluation.summary import summarize
from skydraft.lab.tasks.sets import read_tasks
from tests.cli.conftest import Invoke, invoke  # noqa: F401

from .. import lines, pairs

NUM_TASKS, LEN, PATTERN = 12, 16, "的|一|化|平"


def run(out: Path) -> Records:
    """Tasks that each want a character that some texts of toys have, with limits of their own, and one with turns."""
    check = {"kind": "regex", "pattern": PATTERN}
    texts = enumerate(pairs.prompts(3, NUM_TASKS))
    made = [{"id": str(n), "prompt": text, "check": check, "max_new_tokens": LEN + n} for n, text in texts]
    turns = [{"role": "system", "content": "数"}, {"role": "user", "content": "几"}]
    last = {"id": "system", "check": {"kind": "number", "answer": 7}, "grammar": "regex:[0-9]", "messages": turns}
    tasks = read_tasks(str(lines.jsonl(out.parent / "toys.jsonl", *made, last)))
    request = ComparisonRequest(tasks, lines.modes("edge,cloud,lossless;k=3,quality", LEN))
    return pairs.compared(request, out, pairs.pair(0.3))[0]


def judged(records: Records) -> dict[tuple[str, tuple[int, ...]], VerdictLine]:
    return {(line.prompt, line.token_ids): line for line in records.verdicts}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Records, bytes]:
    """The records of a run that nothing interrupted, and its file."""
    out = tmp_path_factory.mktemp("whole") / "out"
    return run(out), (out / "records.jsonl").read_bytes()


def test_every_text_is_judged_once(whole: tuple[Records, bytes]) -> None:
    records, _ = whole
    assert {line.prompt for line in records.scores} == {line.prompt for line in records.generations}
    assert max(len(line.token_ids) for line in records.generations) > LEN + 1
    last = [line.text for line in records.generations if line.prompt == "toys/system"]
    assert all(re.fullmatch("[0-9]", text) for text in last)
    verdicts = judged(records)
    assert len(verdicts) == len(records.verdicts) > 2 * NUM_TASKS
    for line in records.generations[: 4 * NUM_TASKS]:
        assert verdicts[line.prompt, line.token_ids].score == bool(re.search(PATTERN, line.text))


@pytest.mark.parametrize("cut", [-5, 0, 30])
def test_a_killed_run_goes_on_to_the_same(whole: Any, tmp_path: Path, invoke: Invoke, cut: int) -> None:  # noqa: F811
    records, content = whole
    (out := tmp_path / "out").mkdir()
    (out / "records.jsonl").write_bytes(content[: content.index(b'{"kind":"verdict"') + cut])
    status, _, err = invoke("report", str(out))
    assert status == 0 and "without a verdict, which do not count: " in err
    assert cut < 0 or f"count: {len(records.verdicts)}." in err
    again = run(out)
    assert judged(again) == judged(records) and len(again.generations) == len(records.generations)
    assert "without a verdict" not in invoke("report", str(out))[2]


def test_lossless_scores_as_cloud_and_the_page_says_it_all(whole: tuple[Records, bytes], tmp_path: Path) -> None:
    summary = summarize(Findings(whole[0]))
    (of,) = summary.tasks
    modes = {mode.mode: mode for mode in of.modes}
    assert of.num_tasks == NUM_TASKS + 1
    assert modes["lossless;k=3"].score == modes["cloud"].score
    assert modes["cloud"].written.value == 1 and modes["edge"].calls.value == 0
    by_set = {setting.mode: setting.measures["task_score"].value for setting in summary.settings}
    assert by_set == {name: mode.score.value for name, mode in modes.items()}

    assert write_report(Findings(whole[0]), tmp_path) == summary
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Tasks: toys" in page and "Score against cost: toys" in page
    assert all(f"{mode.score.value:.3f}" in page for mode in of.modes)
    assert 1 <= page.count("<details data-id=") <= 6  # of tasks a few
