"""Comparisons line by line: the order of trials, what is left after an interruption, and the clock."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import skydraft
from skydraft.decoding.generation import Generation
from skydraft.engines.toy import open_toy
from skydraft.errors import RecordsError
from skydraft.gating.gates import parse_gate
from skydraft.gating.hand_back import HandBack
from skydraft.lab.evaluation.records import PromptEntry, keys, read_records
from skydraft.lab.evaluation.runner import Comparison, Trial, measure

from ..serving import waiting
from . import lines, pairs

MODES = lines.modes("edge,cloud,lossless,gate=never")
PROMPTS = tuple(PromptEntry(id=name, prompt=f"say {name}") for name in "abcde")


def start(trial: Trial) -> Generation:
    edge, cloud = pairs.pair(0.2)
    plan, params = trial.mode.plan, trial.mode.params
    return skydraft.generate(trial.prompt.prompt, edge=edge, cloud=cloud, plan=plan, params=params)


a_run = partial(lines.run_line, prompts=PROMPTS, modes=MODES, repetitions=2)


class Interrupted(Exception):
    """Stands for a process that is killed."""


def generate(comparison: Comparison, most: int = 1000) -> int:
    """Make at most so many generations; returns how many were started, the unmeasured ones too."""
    started: list[Trial] = []

    def noted(trial: Trial) -> Generation:
        started.append(trial)
        return start(trial)

    with contextlib.suppress(Interrupted):
        comparison.append(comparison.generations(noted), interrupting(most))
    return len(started)


@contextlib.contextmanager
def interrupting(most: int) -> Iterator[Callable[[], None]]:
    """What is called after each line, and ends all after so many."""
    left = iter(range(most - 1))

    def done() -> None:
        if next(left, None) is None:
            raise Interrupted

    yield done


def test_the_clock_runs_from_before_the_start_to_the_last_token() -> None:
    edge, trial = waiting(open_toy("toy"), lambda: time.sleep(0.02)), Trial(PROMPTS[0], MODES[0], 1)

    @contextlib.contextmanager
    def slowly(trial: Trial) -> Iterator[Generation]:
        time.sleep(0.03)
        with skydraft.generate("say a", edge=edge, plan=trial.mode.plan, params=trial.mode.params) as generation:
            yield generation
        time.sleep(0.5)  # freeing memory is no part of answering

    began = time.perf_counter()
    line = measure(trial, slowly)  # type: ignore[arg-type]
    assert 30 + 3 * 20 <= line.wall_ms <= 1e3 * (time.perf_counter() - began) - 500
    alone = skydraft.generate("say a", edge=open_toy("toy"), plan=trial.mode.plan, params=trial.mode.params).run()
    assert (line.text, line.token_ids, line.origins) == (alone.text, alone.token_ids, alone.origins)
    assert (line.prompt, line.mode, line.repetition, line.finish) == ("a", "edge", 1, "length")
    assert line.num_prompt_tokens == alone.num_prompt_tokens and len(line.records) == len(alone.records)


@pytest.mark.parametrize("most", [1, 3, 17, 39, 40, 1000])
@pytest.mark.parametrize("tail", ["", '{"kind":"gener'])
def test_what_is_done_is_not_done_again(tmp_path: Path, most: int, tail: str) -> None:
    generate(Comparison(tmp_path, a_run()), most)
    path = tmp_path / "records.jsonl"
    before = path.read_text(encoding="utf-8")
    path.write_text(before + tail, encoding="utf-8")
    slower = lines.MODEL.model_copy(update={"forward_ms": (2.0, 3.0)})  # probed again
    again = a_run(started="later", command="again", versions={}, draft=slower, workload="q.txt")
    comparison = Comparison(tmp_path, again)
    num_left = 40 - min(most, 40)
    assert (comparison.num_done, len(comparison.todo)) == (40 - num_left, num_left)
    ours = [trial.mode.name for trial in comparison.todo]
    assert generate(comparison) == len(ours) + len(set(ours))  # each mode once before, to be warm
    assert path.read_text(encoding="utf-8").startswith(before)
    found = read_records(path)
    assert len(found.generations) == len(keys(found.generations)) == 40
    assert [line.mode for line in found.generations] == [mode.name for mode in MODES] * 10  # they take turns
    assert [line.prompt for line in found.generations[:: len(MODES)]] == [prompt.id for prompt in PROMPTS] * 2
    assert found.run.started == a_run().started  # the run is the one that was begun


def test_a_full_disk_at_the_first_line_leaves_no_file(tmp_path: Path) -> None:
    with lines.no_file_beyond(99), pytest.raises(OSError, match="File too large"):
        Comparison(tmp_path, a_run())
    assert len(Comparison(tmp_path, a_run()).todo) == 40 == len(Comparison(tmp_path, a_run()).todo)


def test_a_run_that_answered_nothing_is_in_nobodys_way(tmp_path: Path) -> None:
    Comparison(tmp_path, a_run())  # and its first generation was refused
    assert len(Comparison(tmp_path, a_run(think="off")).todo) == 40
    assert read_records(tmp_path / "records.jsonl").run.think == "off"


def test_each_text_is_judged_once_however_many_wrote_it(tmp_path: Path) -> None:
    run = a_run(modes=lines.modes("edge,edge;style=zh-short,cloud"))
    comparison = Comparison(tmp_path, run)
    generate(comparison)
    todo, style_of = comparison.unscored(), {mode.name: mode.style for mode in run.modes}
    texts = {(line.prompt, style_of[line.mode], line.token_ids) for line in read_records(comparison.path).generations}
    assert len(todo) == len(texts) > 10 and {(prompt.id, mode.style, ids) for prompt, mode, ids in todo} == texts
    asked = [prompt.id for prompt, _, _ in todo]
    assert asked == sorted(asked)  # texts of a prompt together
    judged = (lines.score(ids, prompt=prompt.id, style=mode.style) for prompt, mode, ids in todo)
    with pytest.raises(Interrupted):
        comparison.append(judged, interrupting(4))
    again = Comparison(tmp_path, run)
    assert again.unscored() == todo[4:]
    again.append(judged, interrupting(1000))
    assert again.unscored() == [] and len(read_records(again.path).scores) == len(texts)


# The first mode is another one behind its name.
CHANGED = [
    replace(MODES[0], style="zh-short"), replace(MODES[0], params=replace(MODES[0].params, max_new_tokens=9)),
    *(replace(MODES[0], plan=replace(MODES[0].plan, **of)) for of in (
        {"k": 6}, {"hand_back": HandBack(4)}, {"gate": parse_gate("entropy:3")})),
]  # fmt: skip
OTHERS: list[dict[str, Any]] = [
    {"repetitions": 3}, {"machine": "another machine"}, {"calibration": "0" * 32}, {"think": "off"},
    {"engine_options": {"context_len": 64}}, {"workload_sha256": "1" * 64}, {"execution": "throughput"},
    *({side: lines.MODEL.model_copy(update={"fingerprint": "g"})} for side in ("draft", "target")),
    {"modes": MODES[:3]}, *({"modes": (mode, *MODES[1:])} for mode in CHANGED),
]  # fmt: skip


@pytest.mark.parametrize("changes", OTHERS, ids=lambda changes: next(iter(changes)))
def test_another_run_is_refused_and_the_file_stays_as_it_is(tmp_path: Path, changes: dict[str, Any]) -> None:
    generate(Comparison(tmp_path, a_run()), 3)
    before = (tmp_path / "records.jsonl").read_bytes()
    with pytest.raises(RecordsError, match=f"another run: not the same {next(iter(changes)).replace('_', ' ')}"):
        Comparison(tmp_path, a_run(**changes))
    assert (tmp_path / "records.jsonl").read_bytes() == before
