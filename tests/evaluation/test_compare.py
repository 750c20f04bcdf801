"""Comparisons without a model: the order of jobs, what is left after an interruption, and the clock."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.errors import RecordsError
from skydraft.evaluation.compare import Comparison, Job, PeerText, jobs, measure, measure_peer
from skydraft.evaluation.modes import Mode, parse_modes
from skydraft.evaluation.records import PromptEntry, RunLine, ScoreLine, keys, read_records
from skydraft.types import DraftBlock, Round, StepRecord, Token, VerifyCost

from ..decoding.toys import law
from . import lines

MODES = parse_modes("edge,cloud,lossless,hf-target")
PROMPTS = tuple(PromptEntry(id=name, prompt=f"say {name}") for name in "abcde")


class Telling:
    """A generation that says its job's name, a token a round."""

    finish_reason = "length"
    num_prompt_tokens = 2

    def __init__(self, job: Job, pause_s: float = 0.0, fails: bool = False) -> None:
        self._job = job
        self._pause_s = pause_s
        self._fails = fails
        self.closed = False

    def rounds(self) -> Iterator[tuple[Round, list[Token]]]:
        for number, char in enumerate(f"{self._job.prompt.id}{self._job.mode.name[0]}"):
            time.sleep(self._pause_s)
            if self._fails:
                raise KeyboardInterrupt
            cost = VerifyCost(1, 1, 0.5)
            record = StepRecord(number, 2 + number, 0, 0, 1, "verified", "always", 0.0, 1.0, 1.0 + number, cost)
            done = Round(record, DraftBlock(2 + number, ()), (ord(char),), ("cloud",))
            yield done, [Token(ord(char), "cloud", char, number)]

    def close(self) -> None:
        self.closed = True


def ask(job: Job) -> PeerText:
    return PeerText((1, 2), ("x", "y"), "length", 2)


def a_run(**changes: Any) -> RunLine:
    given_: dict[str, Any] = {"prompts": PROMPTS, "modes": tuple(mode.name for mode in MODES), "repetitions": 2}
    return lines.run_line(**(given_ | changes))


class Interrupted(Exception):
    """Stands for a process that is killed."""


def generate(comparison: Comparison, most: int = 1000) -> int:
    """Make at most so many generations; returns how many were started, the unmeasured ones too."""
    started: list[Job] = []
    written = 0

    def start(job: Job) -> Telling:
        started.append(job)
        return Telling(job)

    def done() -> None:
        nonlocal written
        written += 1
        if written == most:
            raise Interrupted

    with contextlib.suppress(Interrupted):
        comparison.generate(start, ask, done)
    return len(started)


def score(prompt: PromptEntry, mode: Mode, token_ids: tuple[int, ...]) -> ScoreLine:
    size = len(token_ids)
    return ScoreLine(
        prompt=prompt.id, style=mode.style, token_ids=token_ids, choices=token_ids, choice_pieces=("",) * size,
        nll=(0.5,) * size, signals=((0.1, 0.5, 0.9),) * size, drafted=token_ids,
    )  # fmt: skip


@law(100)
@given(
    st.integers(1, 3), st.integers(1, 5), st.lists(st.sampled_from([5.0, 20.0, 80.0]), unique=True), st.integers(1, 6)
)
def test_every_job_once_and_modes_take_turns(
    repetitions: int, num_prompts: int, links: list[float], link_prompts: int
) -> None:
    run = a_run(repetitions=repetitions, prompts=PROMPTS[:num_prompts], links=(None, *links), link_prompts=link_prompts)
    found = [job.key for job in jobs(run, MODES)]
    assert len(found) == len(set(found))
    near = [key for key in found if key[3] is None]
    names = [mode.name for mode in MODES]
    assert [key[1] for key in near] == names * num_prompts * repetitions
    assert [key[:1] + key[2:3] for key in near[:: len(names)]] == [
        (prompt.id, number) for number in range(repetitions) for prompt in PROMPTS[:num_prompts]
    ]
    far = {key for key in found if key[3] is not None}
    assert far == {
        (prompt.id, name, number, link)
        for prompt in PROMPTS[:num_prompts][:link_prompts]
        for name in ("cloud", "lossless")  # the others cross no link
        for number in range(repetitions)
        for link in links
    }


def test_the_clock_runs_from_before_the_start_to_the_last_token() -> None:
    job = Job(PROMPTS[0], MODES[0], 1, 20.0)
    told: list[Telling] = []

    def start(job: Job) -> Telling:
        time.sleep(0.03)
        told.append(Telling(job, pause_s=0.02))
        return told[-1]

    line = measure(job, start)
    assert 70 <= line.wall_ms < 400
    assert (line.prompt, line.mode, line.repetition, line.link_ms, line.finish) == ("a", "edge", 1, 20.0, "length")
    assert (line.text, line.token_ids, line.origins) == ("ae", (ord("a"), ord("e")), ("cloud", "cloud"))
    assert [entry.ended_ms for entry in line.rounds] == [1.0, 2.0]
    assert told[0].closed


def test_a_generation_that_breaks_off_gives_its_seat_back() -> None:
    told = Telling(Job(PROMPTS[0], MODES[0], 0, None), fails=True)
    with pytest.raises(KeyboardInterrupt):
        measure(Job(PROMPTS[0], MODES[0], 0, None), lambda job: told)
    assert told.closed


def test_of_a_peer_tokens_and_time_are_known() -> None:
    line = measure_peer(Job(PROMPTS[0], MODES[3], 0, None), ask)
    assert (line.token_ids, line.text, line.rounds, line.origins) == ((1, 2), "xy", (), ("cloud", "cloud"))


@pytest.mark.parametrize("most", [1, 3, 17, 39, 40, 1000])
@pytest.mark.parametrize("tail", ["", '{"kind":"gener'])
def test_what_is_done_is_not_done_again(tmp_path: Path, most: int, tail: str) -> None:
    generate(Comparison(tmp_path, a_run(), MODES), most)
    path = tmp_path / "records.jsonl"
    before = path.read_text(encoding="utf-8")
    path.write_text(before + tail, encoding="utf-8")
    comparison = Comparison(tmp_path, a_run(started="later", command="again"), MODES)
    num_left = 40 - min(most, 40)
    assert (comparison.num_done, len(comparison.todo)) == (40 - num_left, num_left)
    warm = len({job.mode.name for job in comparison.todo if not job.mode.peer})
    assert generate(comparison) == sum(not job.mode.peer for job in comparison.todo) + warm
    assert path.read_text(encoding="utf-8").startswith(before)
    found = comparison.records()
    assert len(found.generations) == len(keys(found.generations)) == 40
    assert found.run.started == a_run().started  # the run is the one that was begun


def test_each_text_is_judged_once_however_many_wrote_it(tmp_path: Path) -> None:
    modes = parse_modes("edge,edge;style=zh-short,cloud")
    run = a_run(modes=tuple(mode.name for mode in modes))
    comparison = Comparison(tmp_path, run, modes)
    generate(comparison)
    todo = comparison.unscored()
    assert len(todo) == len({(prompt.id, mode.style, ids) for prompt, mode, ids in todo}) == 15
    asked = [prompt.id for prompt, _, _ in todo]
    assert asked == sorted(asked)  # texts of a prompt together
    made = 0

    def done() -> None:
        nonlocal made
        made += 1
        if made == 4:
            raise Interrupted

    with pytest.raises(Interrupted):
        comparison.score(score, done)
    again = Comparison(tmp_path, run, modes)
    assert again.unscored() == todo[4:]
    again.score(score, lambda: None)
    assert again.unscored() == [] and len(again.records().scores) == 15


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"repetitions": 3}, "repetitions"),
        ({"max_new_tokens": 9}, "max new tokens"),
        ({"overrides": {"seed": 1}}, "overrides"),
        ({"workload_sha256": "1" * 64}, "workload sha256"),
        ({"prompts": PROMPTS[:2]}, "prompts"),
        ({"links": (None, 5.0)}, "links"),
        ({"link_prompts": 2}, "link prompts"),
        ({"execution": "throughput"}, "execution"),
        ({"share_audio": "none"}, "share audio"),
        ({"draft": lines._MODEL.model_copy(update={"fingerprint": "g"})}, "draft model"),
        ({"target": lines._MODEL.model_copy(update={"fingerprint": "g"})}, "target model"),
    ],
)
def test_another_run_is_refused_and_the_file_stays_as_it_is(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    generate(Comparison(tmp_path, a_run(), MODES), 3)
    before = (tmp_path / "records.jsonl").read_bytes()
    with pytest.raises(RecordsError, match=f"another run: its {says} differs"):
        Comparison(tmp_path, a_run(**changes), MODES)
    assert (tmp_path / "records.jsonl").read_bytes() == before


def test_a_run_begins_with_its_description_whatever_folder_it_is_given(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    comparison = Comparison(folder, a_run(), MODES)
    assert read_records(folder / "records.jsonl").run == comparison.run == a_run()
    (tmp_path / "records.jsonl").touch()  # an empty file is none
    assert Comparison(tmp_path, a_run(), MODES).num_done == 0
