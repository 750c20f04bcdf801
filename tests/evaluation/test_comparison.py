"""Whole comparisons of toys from Python: what is refused before anything runs, and what a mode means while it runs. Of
tasks: verdicts, the same after a kill, and what the page says.
"""

import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

import skydraft
from skydraft import config
from skydraft.config import DecodingParams
from skydraft.decoding.plan import Plan, make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.errors import OptionError, PromptError, RecordsError
from skydraft.lab.evaluation.comparison import ComparisonRequest, request_of
from skydraft.lab.evaluation.findings import Findings
from skydraft.lab.evaluation.modes import Mode
from skydraft.lab.evaluation.records import PromptEntry, Records, VerdictLine
from skydraft.lab.evaluation.report.page import write_report
from skydraft.lab.evaluation.summary import summarize
from skydraft.lab.evaluation.workloads import Workload, read_prompts
from skydraft.lab.tasks.checks import Task
from skydraft.lab.tasks.sets import read_tasks
from skydraft.prompts.audio import load_audio

from ..cli.conftest import Invoke, invoke  # noqa: F401
from ..speech.hearing import HearingToy
from . import lines, pairs

DRIFT = 0.2
NUM_TASKS, LEN, PATTERN = 12, 16, "的|一|化|平"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path / "home"))


def request(names: str, **given: Any) -> ComparisonRequest:
    return ComparisonRequest(**({"workload": pairs.workload(7, 3), "modes": lines.modes(names, 12)} | given))


def run(asked: ComparisonRequest, out: Path, drift: float = DRIFT) -> tuple[Records, list[str]]:
    return pairs.compared(asked, out, pairs.pair(drift))


def tone(folder: Path, name: str = "a.wav") -> Path:
    soundfile.write(folder / name, np.sin(np.arange(8000) / 9).astype(np.float32), 16_000)
    return lines.jsonl(folder / "spoken.jsonl", {"prompt": "说", "audio": name})


def run_tasks(out: Path) -> Records:
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
    return run_tasks(out), (out / "records.jsonl").read_bytes()


def test_recordings_are_read_before_anything_runs(tmp_path: Path) -> None:
    workload = read_prompts(tone(tmp_path))
    for names in ("edge,cloud", "cloud;style=zh-short"):
        with pytest.raises(OptionError, match="does not hear a recording cannot check"):
            run(request(names, workload=workload, share_audio="none"), tmp_path / "out")
    (tmp_path / "a.wav").unlink()
    with pytest.raises(PromptError, match=r"no readable file .*a\.wav"):
        request("edge", workload=workload)


def test_a_calibration_is_refused_where_it_is_missing_of_another_pair_or_of_another_run(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"no calibration for toy:drift=0\.2 and toy"):
        run(request("edge,gate=calibrated:0.9;k=4"), tmp_path / "out")
    mine = pairs.calibration(DRIFT)
    other = mine.model_copy(update={"risks": mine.risks[::-1]})
    asked, again = (request("auto;gate=calibrated:0.85;k=12;hand-back=0", calibration=each) for each in (mine, other))
    with pytest.raises(OptionError, match=r"made for toy:drift=0\.2 and toy"):
        run(asked, tmp_path / "out", 0.1)
    assert not (tmp_path / "out").exists()
    assert len(run(asked, tmp_path / "out")[0].generations) == 3
    with pytest.raises(RecordsError, match="not the same calibration"):
        run(again, tmp_path / "out")


def test_a_prompt_that_a_mode_cannot_answer_is_found_before_the_first_is_answered(tmp_path: Path) -> None:
    task = Task(set="s", check={"kind": "regex", "pattern": "."}, grammar="regex:a+")  # type: ignore[arg-type]
    prompts = (PromptEntry(id="1", prompt="语"), PromptEntry(id="2", prompt="速", task=task))
    with pytest.raises(OptionError, match=r"modes edge;style=zh-short: .* does not apply to a grammar"):
        run(request("cloud,edge;style=zh-short", workload=Workload("w", "0" * 64, prompts)), tmp_path / "out")
    prompts = (prompts[0], PromptEntry(id="3", prompt="语速" * 3000))
    for names, side in (("edge", r"toy:drift=0\.2"), ("quality", "toy")):
        with pytest.raises(PromptError, match=f"The prompt 3 .* 6000 tokens, the context of {side} holds 4096"):
            run(request(names, workload=Workload("w", "0" * 64, prompts)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_mode_runs_as_resolved_whatever_presets_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "edge,cloud,lossless,quality,answers;gate=margin:0.2;k=3,cloud;style=zh-short"
    asked = request(names, repetitions=2)
    monkeypatch.setattr(config, "MODES", {})
    monkeypatch.setattr(config, "STYLES", {})
    found, said = run(asked, tmp_path)
    edge, cloud = pairs.pair(DRIFT)
    said_of = attrgetter("base", "num_draft", "num_accepted", "outcome", "reason")
    by_name, judged = {mode.name: mode for mode in asked.modes}, set()
    prompts = {prompt.id: prompt.prompt for prompt in asked.workload.prompts}
    for line in found.generations:
        mode = by_name[line.mode]
        alone = skydraft.generate(prompts[line.prompt], edge=edge, cloud=cloud, plan=mode.plan, params=mode.params)
        assert (line.token_ids, line.origins) == (alone.run().token_ids, alone.origins)
        assert [*map(said_of, line.records)] == [*map(said_of, alone.records)]
        judged.add((line.prompt, mode.style, line.token_ids))
    assert {(line.prompt, line.style, line.token_ids) for line in found.scores} == judged
    num = len(judged)
    assert said == ["36 of 36 generations, judged afterwards", f"{num} of {num} texts judged"]
    assert found.run.modes == asked.modes


def test_recordings_are_heard_by_both(tmp_path: Path) -> None:
    edge, cloud = HearingToy(3, 0.5), HearingToy(3)
    asked = request("edge,lossless", workload=read_prompts(tone(tmp_path)))
    found, _ = pairs.compared(asked, tmp_path / "out", (edge, cloud))
    assert found.run.share_audio == "features"
    given: dict[str, Any] = {"params": DecodingParams(max_new_tokens=12), "audio": load_audio(tmp_path / "a.wav")}
    for line, mode in zip(found.generations, asked.modes, strict=True):
        alone = skydraft.generate("说", edge=edge, cloud=cloud, plan=mode.plan, break_loops=False, **given).run()
        assert (line.token_ids, line.origins) == (alone.token_ids, alone.origins)
    # Each model judges from what it hears: it agrees with its own text, and the target not with the draft's.
    by_text = {line.token_ids: line for line in found.scores}
    edge_line, lossless = (by_text[line.token_ids] for line in found.generations)
    assert edge_line.drafted == edge_line.token_ids != edge_line.choices and lossless.choices == lossless.token_ids


def test_a_task_with_tools_or_turns_is_asked_with_the_system_prompt_that_an_app_has() -> None:
    turns = [{"role": "user", "content": "语速"}]
    tools = [{"type": "function", "function": {"name": "f"}}]

    def asked_with(plan: Plan, **task: Any) -> GenerateRequest:
        made = Task(set="own", check={"kind": "exact", "answer": "a"}, **task)  # type: ignore[arg-type]
        mode = Mode("edge", plan, DecodingParams())
        system = None if "tools" in task else "短"
        return request_of(PromptEntry(id="a", prompt="语速", task=made), mode, system=system)

    for plan, gate in ((make_plan("auto"), "calibrated:0.95+start"), (make_plan(gate="prob:0.3"), "prob:0.3")):
        called = asked_with(plan, tools=tools)
        assert [each.role for each in called.messages] == ["system", "user"] and called.params.min_call_prob > 0
        assert str(called.plan.gate) == gate
    for own, asked in ((turns, "短"), ([{"role": "system", "content": "长"}, *turns], "长")):
        assert [each.content for each in asked_with(make_plan("edge"), messages=own).messages] == [asked, "语速"]


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
    again = run_tasks(out)
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
