"""Records: what is written is what is read, an interruption costs one line, and a broken file is one clear line."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from skydraft.errors import RecordsError
from skydraft.lab.evaluation.records import GenerationLine, Records, RunLine, drop_cut_line, read_records, round_entry
from skydraft.types import Cost, DraftBlock, LinkCost, Round, Signals

from ..toys import law
from . import lines

texts = st.text(max_size=12)  # line separators, quotes and other scripts among them
MODES = "edge,gate=entropy:0.1+digits;k=3,auto;gate=calibrated:0.9,answers;hand-back=agree:2,quality;style=zh-short"


@st.composite
def runs(draw: st.DrawFn) -> RunLine:
    prompt = lines.run_line().prompts[0].model_copy(update={"prompt": draw(texts)})
    return lines.run_line(prompts=(prompt,), modes=lines.modes(MODES))


@st.composite
def generations(draw: st.DrawFn, least: int = 0) -> list[GenerationLine]:
    """Each a repetition of its own: a generation is told by its number."""
    pieces = st.tuples(texts, texts, texts)
    times = st.floats(0.001, 1e6).map(lambda ms: round(ms, 5))  # with as many digits as are written
    found = draw(st.lists(st.tuples(pieces, times), min_size=least, max_size=3))
    return [lines.generation(pieces=of, wall_ms=ms, repetition=number) for number, (of, ms) in enumerate(found)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@law(75)
@given(runs(), generations())
def test_what_is_written_is_what_is_read(folder: Path, run: RunLine, made: list[GenerationLine]) -> None:
    judged = (lines.score(), lines.score(style="zh-short"))
    found = read_records(lines.write(folder, run, *made, *judged))
    assert found == Records(run=run, generations=tuple(made), scores=judged)


@law(30)
@given(generations(1), st.data())
def test_a_file_cut_anywhere_has_its_whole_lines(folder: Path, made: list[GenerationLine], data: st.DataObject) -> None:
    path = lines.write(folder, lines.run_line(), *made)
    whole = path.read_bytes()
    content = whole[: data.draw(st.integers(whole.index(b"\n") + 1, len(whole)))]  # also inside of a character
    path.write_bytes(content)
    num_whole = content.count(b"\n") - 1
    found = read_records(path).generations
    assert found[:num_whole] == tuple(made[:num_whole])
    assert len(found) <= num_whole + 1  # the last may lack no more than its newline
    place = path.stat().st_ino
    drop_cut_line(path)
    assert path.stat().st_ino == place  # a full disk takes no second file
    kept = path.read_bytes()
    assert content.startswith(kept) and kept.endswith(b"\n") and kept.count(b"\n") == num_whole + 1
    assert read_records(path).generations == tuple(made[:num_whole])


def broken(content: str, *more: BaseModel) -> str:
    return lines.text_of(lines.run_line()) + content + lines.text_of(*(more or (lines.generation(),)))


def nested(line: BaseModel, path: str, value: Any) -> str:
    """A line with something else at a place inside, or something more."""
    found = json.loads(line.model_dump_json(by_alias=True))
    *way, last = [int(step) if step.isdecimal() else step for step in path.split(".")]
    inner = found
    for step in way:
        inner = inner[step]
    inner[last] = value
    return json.dumps(found) + "\n"


RUN, GENERATION, SCORE = lines.run_line(), lines.generation(), lines.score()
BROKEN: dict[str, tuple[str, str]] = {
    "not there": ("", "cannot be read: No such file"), "no text": ("\udcff\udcfe\n", "not UTF-8"),
    "no first line": (lines.text_of(GENERATION), "does not begin with a line"),
    "a run in the middle": (broken(lines.text_of(RUN)), "its only one"),
    "a line cut in the middle": (broken('{"kind":"gene\n'), "Line 2"),
    "another schema": (nested(RUN, "schema", 2), "schema: "),
    "unknown origin": (broken(nested(GENERATION, "origins", ["edge", "edge", "sky"])), "origins.2"),
    "unknown mode": (broken(nested(GENERATION, "mode", "turbo")), "a line for a prompt or a mode"),
    "a generation twice": (broken(lines.text_of(GENERATION)), "twice"),
    "fewer origins than tokens": (broken(nested(GENERATION, "origins", ["edge"])), "lists differ in length"),
    **{f"a score with fewer {name} than tokens": (broken(nested(SCORE, name, of[:1])), "lists differ in length")
       for name, of in SCORE if name in ("choices", "nll", "signals", "drafted", "choice_pieces")},
    "rounds of fewer tokens": (broken(nested(GENERATION, "rounds.0.record.num_committed", 2)), "lists differ"),
    "a time that is no number": (broken(nested(GENERATION, "rounds.0.record.wall_ms", math.nan)), "wall_ms"),
    "a style that names a file elsewhere": (nested(RUN, "modes.0.style", "../../out"), "no style"),
    "a gate that is not registered": (nested(RUN, "modes.0.plan.gate.kind", "mine"), "no gate 'mine'"),
    "a plan that cannot be": (nested(RUN, "modes.0.plan.k", 0), "Line 1"),
    "parameters out of range": (nested(RUN, "modes.0.params.temperature", -1), ": temperature must"),
    # What a newer version meant by an unknown key cannot be known, so no figure is made without it.
    **{f"a key in {at}": (nested(RUN, f"{at}.colour", "red"), f"{at}.colour: ")
       for at in ("prompts.0", "draft", "modes.0", "modes.0.plan", "modes.0.plan.gate", "modes.0.params")},
    **{f"a key in a round{at}": (broken(nested(GENERATION, f"rounds.0{at}.colour", "red")), f"rounds.0{at}.colour: ")
       for at in ("", ".record", ".record.draft", ".record.target", ".record.link")},
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_one_clear_line(tmp_path: Path, case: str) -> None:
    content, says = BROKEN[case]
    data = content.encode(errors="surrogateescape") if content else None
    lines.assert_refused(read_records, tmp_path / "records.jsonl", data, says, RecordsError)


def test_a_round_is_written_as_it_happened(tmp_path: Path) -> None:
    record = lines.record(
        base=12, wall_ms=15.1234567, draft=Cost(2, 2, 2.0, 1.0, 0.25), target=Cost(2, 7, 5.0004949, 1.25, 0.5, 0.125),
        link=LinkCost(9.0, 40, 17, 8), num_audited=4, num_agreed=3,
    )  # fmt: skip
    block = DraftBlock(12, (5, 6, 7), (Signals(1.23456, 0.1234567, 0.5),) * 3, "gate")
    entry = round_entry(Round(record, block, (5, 6, 8), ("accepted", "accepted", "recovered")))
    assert (entry.draft_ids, entry.ended_by, entry.signals) == ((5, 6, 7), "gate", ((1.2346, 0.12346, 0.5),) * 3)
    (again,) = read_records(lines.write(tmp_path, RUN, lines.generation(rounds=(entry,)))).generations[0].records
    assert again == replace(record, wall_ms=15.12346, target=replace(record.target, forward_ms=5.00049))
