"""Records: what is written is what is read, an interruption costs one line, and a broken file is one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from skydraft.errors import RecordsError
from skydraft.evaluation import records
from skydraft.evaluation.records import GenerationLine, Records, drop_cut_line, keys, read_records, round_entry
from skydraft.types import DraftBlock, Round, Signals, StepRecord, VerifyCost

from ..decoding.toys import law
from . import lines

times = st.floats(0, 1e6)
counts = st.integers(0, 10_000)
texts = st.text(max_size=12)  # line separators, quotes and other scripts among them
token_ids = st.lists(st.integers(0, 150_000), max_size=6).map(tuple)
signals = st.tuples(times, st.floats(0, 1), st.floats(0, 1))

rounds = st.builds(
    lines.round_line,
    base=counts, num_draft=counts, num_accepted=counts, num_committed=st.just(1), reason=texts, draft_ms=times,
    outcome=st.sampled_from(["verified", "skipped", "fallback"]), wall_ms=times, ended_ms=times, num_rows=counts,
    rtt_ms=times, bytes_up=counts, draft_ids=token_ids, signals=st.lists(signals, max_size=3).map(tuple),
)  # fmt: skip


@st.composite
def generations(draw: st.DrawFn) -> GenerationLine:
    ids = draw(token_ids)
    return lines.generation(
        token_ids=ids,
        origins=tuple(draw(st.sampled_from(["accepted", "edge", "edge-fallback"])) for _ in ids),
        pieces=tuple(draw(texts) for _ in ids),
        rounds=tuple(draw(rounds) for _ in ids),
        wall_ms=draw(st.floats(0.001, 1e6)),
        link_ms=draw(st.none() | times),
    )


@st.composite
def scores(draw: st.DrawFn) -> Any:
    ids = draw(token_ids)
    return lines.score(
        style=draw(st.none() | st.just("zh-short")),
        token_ids=ids,
        choices=ids[::-1],
        choice_pieces=tuple(draw(texts) for _ in ids),
        nll=tuple(draw(times) for _ in ids),
        signals=tuple(draw(signals) for _ in ids),
        drafted=ids,
    )


def numbered(made: list[GenerationLine]) -> list[GenerationLine]:
    """Each a repetition of its own: a generation is told by its number."""
    return [line.model_copy(update={"repetition": number}) for number, line in enumerate(made)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@law(150)
@given(st.lists(generations(), max_size=3), st.lists(scores(), max_size=2), texts)
def test_what_is_written_is_what_is_read(
    folder: Path, made: list[GenerationLine], judged: list[Any], prompt: str
) -> None:
    made = numbered(made)
    run = lines.run_line(prompts=(lines.run_line().prompts[0].model_copy(update={"prompt": prompt}),))
    found = read_records(lines.write(folder, run, *made, *judged))
    assert found == Records(run=run, generations=tuple(made), scores=tuple(judged))


@law(60)
@given(st.lists(generations(), min_size=1, max_size=3), st.data())
def test_a_file_cut_anywhere_has_the_lines_that_were_whole(
    folder: Path, made: list[GenerationLine], data: st.DataObject
) -> None:
    made = numbered(made)
    path = lines.write(folder, lines.run_line(), *made)
    whole = path.read_text(encoding="utf-8")
    cut = data.draw(st.integers(whole.index("\n") + 1, len(whole)))
    content = whole[:cut].encode()
    path.write_bytes(content)
    num_whole = content.count(b"\n") - 1
    found = read_records(path).generations
    assert found[:num_whole] == tuple(made[:num_whole])
    assert len(found) <= num_whole + 1  # the last may lack no more than its newline
    drop_cut_line(path)
    kept = path.read_bytes()
    assert content.startswith(kept) and kept.endswith(b"\n") and kept.count(b"\n") == num_whole + 1
    assert read_records(path).generations == tuple(made[:num_whole])


def test_a_file_cut_inside_a_character_has_the_lines_before(tmp_path: Path) -> None:
    path = lines.write(tmp_path, lines.run_line(), lines.generation(), lines.generation(pieces=("我", "在", "员")))
    content = path.read_bytes()
    path.write_bytes(content[: content.rindex("员".encode()) + 1])
    assert read_records(path).generations == (lines.generation(),)


def test_nothing_is_dropped_from_whole_lines(tmp_path: Path) -> None:
    path = lines.write(tmp_path, lines.run_line(), lines.generation())
    before = path.read_bytes()
    drop_cut_line(path)
    assert path.read_bytes() == before


def broken(content: str, *more: BaseModel) -> str:
    """A file with something in its middle."""
    return lines.text_of(lines.run_line()) + content + lines.text_of(*(more or (lines.generation(),)))


def changed(line: BaseModel, **changes: Any) -> str:
    return json.dumps(json.loads(line.model_dump_json(by_alias=True)) | changes) + "\n"


RUN, GENERATION, SCORE = lines.run_line(), lines.generation(), lines.score()
BROKEN: dict[str, tuple[str, str]] = {
    "empty": ("", "does not begin with the line"),
    "no first line": (lines.text_of(GENERATION), "does not begin with the line"),
    "a run in the middle": (broken(lines.text_of(RUN)), "more than one run"),
    "a line cut in the middle": (broken('{"kind":"gene\n'), "Line 2"),
    "a word": (broken("word\n"), "Line 2"),
    "a list": (broken("[1]\n"), "Line 2"),
    "null": (broken("null\n"), "Line 2"),
    "newer schema": (changed(RUN, schema=2), "schema 2, and this version reads up to 1. Use a newer skydraft."),
    "older schema": (changed(RUN, schema=0), "schema"),
    "unknown kind": (broken(changed(GENERATION, kind="opinion")), "Line 2"),
    "unknown field": (broken(changed(GENERATION, colour="red")), "colour"),
    "missing field": (broken('{"kind":"generation","prompt":"a"}\n'), "Line 2"),
    "unknown origin": (broken(changed(GENERATION, origins=["edge", "edge", "sky"])), "origins.2"),
    "text for a number": (broken(changed(GENERATION, wall_ms="long")), "wall_ms"),
    "unknown prompt": (broken(changed(GENERATION, prompt="z")), "a prompt z"),
    "unknown mode": (broken(changed(GENERATION, mode="turbo")), "a mode turbo"),
    "score of an unknown prompt": (broken(changed(SCORE, prompt="z")), "a prompt z"),
    "fewer origins than tokens": (broken(changed(GENERATION, origins=["edge"])), "lists differ in length"),
    "fewer pieces than tokens": (broken(changed(GENERATION, pieces=["a"])), "lists differ in length"),
    "fewer choices than tokens": (broken(changed(SCORE, choices=[1])), "lists differ in length"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_one_clear_line(tmp_path: Path, case: str) -> None:
    content, says = BROKEN[case]
    path = tmp_path / "records.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(RecordsError) as caught:
        read_records(path)
    assert says in str(caught.value) and "records.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["nll", "signals", "drafted", "choice_pieces"])
def test_every_list_of_a_score_is_as_long_as_its_text(tmp_path: Path, field: str) -> None:
    path = tmp_path / "records.jsonl"
    shorter = json.loads(SCORE.model_dump_json())[field][:1]
    path.write_text(broken(changed(SCORE, **{field: shorter})), encoding="utf-8")
    with pytest.raises(RecordsError, match="length"):
        read_records(path)


def test_rounds_commit_as_many_tokens_as_there_are(tmp_path: Path) -> None:
    path = lines.write(tmp_path, RUN, lines.generation(rounds=(lines.round_line(num_committed=2),)))
    with pytest.raises(RecordsError):
        read_records(path)


def test_files_that_are_no_files_of_text(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match="cannot be read: No such file"):
        read_records(tmp_path / "records.jsonl")
    with pytest.raises(RecordsError, match="cannot be read"):
        read_records(tmp_path)
    (tmp_path / "records.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(RecordsError, match="not UTF-8"):
        read_records(tmp_path / "records.jsonl")


def test_a_round_is_written_as_it_happened() -> None:
    cost = VerifyCost(2, 7, 5.00049, 1.25, 0.5, 9.0, 40, 17)
    record = StepRecord(3, 12, 3, 2, 3, "verified", "loop", 2.0, 15.1234, 99.9, cost, 4, 3)
    block = DraftBlock(12, (5, 6, 7), (Signals(1.23456, 0.1234567, 0.5),) * 3, "gate")
    entry = round_entry(Round(record, block, (5, 6, 8), ("accepted", "accepted", "recovered")))
    assert (entry.draft_ids, entry.ended_by, entry.signals) == ((5, 6, 7), "gate", ((1.2346, 0.12346, 0.5),) * 3)
    assert (entry.wall_ms, entry.forward_ms, entry.bytes_up, entry.bytes_down) == (15.123, 5.0, 40, 17)
    again = entry.record(3)
    assert (again.round, again.base, again.outcome, again.reason) == (3, 12, "verified", "loop")
    assert (again.num_draft, again.num_accepted, again.num_committed) == (3, 2, 3)
    assert (again.num_audited, again.num_agreed) == (4, 3)
    assert again.cost == entry.record(3).cost == VerifyCost(2, 7, 5.0, 1.25, 0.5, 9.0, 40, 17)
    assert again.cost.rtt_ms == 9.0 and again.overhead_ms == pytest.approx(15.123 - 2.0 - 9.0)


def test_text_and_keys() -> None:
    line = lines.generation(link_ms=20.0, repetition=2)
    assert line.text == "我在。"
    assert keys([line, line, lines.generation()]) == {("a", "edge", 2, 20.0), ("a", "edge", 0, None)}
    assert records.SCHEMA == 1
