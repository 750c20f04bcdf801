"""Servers that fail, lie, flood, stall and die, behind our wire and behind HTTP: the same promises hold of both.

A gated text goes on alone within a second or so, any other ends with one clear line; no token is lost, doubled or made
up; and a server that is back is used again. What only one wire has is tested with it: `tests/edge`, `tests/stock`.
"""

import random
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from itertools import chain, count, repeat
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft import Generation
from skydraft.errors import SkydraftError, VocabularyMismatch
from skydraft.types import Token
from tests.hostile.lines import DIALECTS, WIRES, OwnLine, StockLine, known, line
from tests.hostile.storms import LATER, ONCE, STORMS
from tests.hostile.texts import (
    ALONE,
    LENGTH,
    PLANS,
    assert_all_is_accounted_for,
    assert_one_clear_line,
    failure_of,
    letters,
    write,
)
from tests.serving import PATIENCE_S
from tests.stock import faults
from tests.toys import law


def rows(of: Iterable[str]) -> list[tuple[str, str]]:
    """(wire, name) of these faults; ids on the wire of each dialect."""
    found = [(wire, name) for name in of for wire, fault in zip(WIRES, ONCE[name], strict=True) if fault]
    return found + [(dialect, name) for name in of for dialect in DIALECTS if "ids" in name.split()]


ROWS, ROWS_LATER, ROWS_ONCE = rows(STORMS), rows(LATER), rows(ONCE)
ROWS_ONCE += [(dialect, name) for dialect in DIALECTS for name in LATER]
PLANS_ONCE = [(*row, plan) for row in ROWS_ONCE for plan in PLANS if row[0] in WIRES or plan == "cloud"]
FINAL = ("another key", "no such path")  # once is enough
FINAL_IF_VERIFIED = ("limited for long", "gigabytes in one message")
HASTY_S, LONG_S = 0.25, 20.0  # --cloud-timeout
SOON_MS = 4000.0  # a second, and what a busy machine adds


def fault_of(wire: str, name: str) -> Any:
    return ONCE[name][wire != "own"]


@pytest.fixture(scope="module")
def lines() -> Iterator[dict[str, Any]]:
    """A server behind each wire, with a hasty and a patient connection: what one text met does not hurt the next."""
    with ExitStack() as stack:
        found = {}
        for wire in (*WIRES, *DIALECTS):
            each = stack.enter_context(line(wire))
            hasty, patient = (stack.enter_context(known(each, timeout_s)) for timeout_s in (HASTY_S, LONG_S))
            found[wire] = each, hasty, patient
        yield found


@pytest.fixture
def calm(lines: dict[str, Any], wire: str) -> Any:
    """(the server, the hasty connection, the patient one)"""
    lines[wire][0].calm()
    return lines[wire]


def killed(each: OwnLine | StockLine, generation: Generation, num_tokens: int) -> Iterator[Token]:
    """What comes of a text after so many tokens, when its server is killed."""
    tokens = iter(generation)
    for _ in range(num_tokens):
        next(tokens)
    each.kill()
    return tokens


@pytest.mark.parametrize(("wire", "name"), ROWS)
def test_a_gated_text_goes_on_alone_soon(calm: Any, wire: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sooner here than usual; below one server falls silent for as long as it may."""
    monkeypatch.setattr("skydraft.edge.recovery.FALLBACK_S", 0.2)
    monkeypatch.setattr("skydraft.edge.recovery._LIMIT_S", 0.2)
    each, _, patient = calm
    each.storm(chain([None, None], repeat(fault_of(wire, name))))
    generation = write(patient, "gated")
    failure = failure_of(generation, "gated")
    assert bool(failure) == (name == "another key")  # this is for the user to know
    assert failure or "edge-fallback" in generation.origins
    assert max(record.wall_ms for record in generation.records) < SOON_MS


@pytest.mark.parametrize("wire", WIRES)
def test_a_gated_text_goes_on_alone_when_a_server_falls_silent(calm: Any, wire: str) -> None:
    each, _, patient = calm
    generation = write(patient, "gated")
    rounds = generation.rounds()
    while not any(record.outcome == "verified" for record in generation.records):
        next(rounds)
    each.silence()
    list(rounds)
    assert "edge-fallback" in generation.origins and len(generation.token_ids) == LENGTH
    assert max(record.wall_ms for record in generation.records) < SOON_MS
    assert_all_is_accounted_for(generation)


@pytest.mark.parametrize(("wire", "name"), ROWS)
def test_a_text_that_is_always_verified_ends_with_one_clear_line(calm: Any, wire: str, name: str) -> None:
    each, hasty, _ = calm
    each.storm(repeat(fault_of(wire, name)))
    assert all(failure_of(write(hasty, plan), plan) for plan in ("cloud", "checked"))


@pytest.mark.parametrize("plan", [*PLANS])
@pytest.mark.parametrize(("wire", "name"), ROWS_LATER)
def test_what_begins_well_and_fails_costs_no_token(calm: Any, wire: str, name: str, plan: str) -> None:
    """Each try may bring some tokens, so that a text may come to its end so."""
    each, hasty, _ = calm
    each.storm(repeat(fault_of(wire, name)))
    assert not failure_of(write(hasty, plan), plan) or plan != "gated"


@pytest.mark.parametrize(("wire", "name", "plan"), PLANS_ONCE)
def test_what_fails_once_costs_no_token(calm: Any, wire: str, name: str, plan: str) -> None:
    each, hasty, patient = calm
    chance = random.Random(f"{wire} {name} {plan}")
    num_sound = 0 if plan == "cloud" else chance.randrange(6)
    each.storm([*repeat(None, num_sound), fault_of(wire, name)])
    if failure_of(write(hasty if name in LATER else patient, plan), plan):
        assert name in FINAL or (plan != "gated" and name in (*FINAL_IF_VERIFIED, *LATER))


more = st.lists(st.none() | st.sampled_from([*ONCE]), max_size=6)


@law(20)
@given(st.sampled_from(ROWS_ONCE), more, st.sampled_from([*PLANS]))
def test_faults_that_follow_each_other_cost_no_token(lines: Any, first: Any, others: list[str], plan: str) -> None:
    wire, name = first
    each, hasty, _ = lines[wire]
    each.calm()
    each.storm([fault_of(wire, one) if one else None for one in (name, *others)])
    if failure_of(write(hasty, plan), plan):
        assert plan != "gated" or {name, *others} & {*FINAL}


@pytest.mark.parametrize("wire", WIRES)
def test_a_server_that_says_when_to_come_back_is_not_asked_before(calm: Any, wire: str, unhurried: None) -> None:
    each, _, patient = calm
    asked = count()
    each.storm(fault_of(wire, "limited for long") for _ in asked)
    assert set(write(patient, "gated").run().origins) <= {"skipped", "edge-fallback"}
    assert next(asked) == 1


@pytest.mark.parametrize("wire", WIRES)
def test_a_server_that_is_slow_and_well_is_not_taken_for_lost(wire: str, unhurried: None) -> None:
    """Each token takes longer than a silence may last."""
    with line(wire) as each, known(each, PATIENCE_S) as cloud:
        slow = {"own": lambda replies, context: map(_later, replies), "stock": faults.slow(1.3)}[wire]
        each.storm(repeat(slow))
        generation = write(cloud, "gated")
        tokens = iter(generation)
        while not set(generation.origins) & {"accepted", "recovered", "edge-fallback"}:
            next(tokens)
        assert "edge-fallback" not in generation.origins
        generation.close()
        assert_all_is_accounted_for(generation)


def _later(message: bytes) -> bytes:
    time.sleep(1.3)
    return message


@pytest.mark.parametrize("wire", [*WIRES, *DIALECTS])
def test_a_cancel_while_it_waits_commits_no_block_that_nobody_checked(wire: str) -> None:
    """Neither in the middle of a wait for the server, nor of one for its facts: to be cancelled is no outage."""
    with line(wire, token_s=0.02) as each, known(each, LONG_S) as cloud:
        for number in range(12):
            generation = write(cloud, "gated", length=2000)
            late = threading.Timer(0.03 * number, generation.cancel)
            late.start()
            list(generation.rounds())
            late.join()
            assert "edge-fallback" not in generation.origins and len(generation.token_ids) < 2000
            assert_all_is_accounted_for(generation)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("wire", [*WIRES, *DIALECTS])
def test_another_vocabulary_is_said_and_no_token_used(wire: str, plan: str) -> None:
    with line(wire, is_other=True) as each, closing(skydraft.connect(each.url)) as cloud:
        origins: set[str] = set()

        def run_texts() -> None:
            for _ in range(10 if plan == "gated" else 1):  # a short gated text may end before a busy server has said it
                generation = write(cloud, plan)
                try:
                    generation.run()
                finally:
                    origins.update(generation.origins)
                time.sleep(0.2)

        with pytest.raises(VocabularyMismatch) as failed:
            run_texts()
        assert_one_clear_line(failed.value)
        assert not origins & {"accepted", "recovered", "bonus", "cloud"}


@pytest.mark.parametrize("plan", ["cloud", "checked"])
@pytest.mark.parametrize("wire", WIRES)
def test_a_server_that_is_killed_and_comes_back_costs_no_token(wire: str, plan: str) -> None:
    with line(wire, token_s=0.01) as each, known(each, PATIENCE_S) as cloud:
        tokens = killed(each, generation := write(cloud, plan), LENGTH // 4)
        back = threading.Timer(0.5, each.start)
        back.start()
        list(tokens)
        back.join()
        assert generation.token_ids == ALONE


@pytest.mark.parametrize("wire", WIRES)
def test_a_gated_text_comes_back_to_a_server_that_is_back(wire: str) -> None:
    with line(wire, token_s=0.005) as each, known(each, PATIENCE_S) as cloud:
        tokens = killed(each, generation := write(cloud, "gated", length=400), 30)
        while "edge-fallback" not in generation.origins:
            next(tokens)
        each.start()
        for _ in tokens:
            time.sleep(0.03)  # it is looked for now and then
            if generation.origins[-1] in ("accepted", "recovered", "bonus"):
                break
        else:
            raise AssertionError("it never came back")
        assert_all_is_accounted_for(generation)
        generation.close()


@pytest.mark.parametrize("wire", WIRES)
def test_each_outage_is_told_of_once_and_costs_one_wait(wire: str) -> None:
    said = list[str]()
    with line(wire) as each, known(each, PATIENCE_S, notify=said.append) as cloud:
        for _ in range(3):
            each.kill()
            assert "edge-fallback" in write(cloud, "gated").run().origins
            cloud.servers.facts.clear()  # as after two minutes
            began = time.monotonic()
            assert set(write(cloud, "gated").run().origins) == {"edge-fallback"} and time.monotonic() - began < 0.5
            each.start()
            assert "edge-fallback" not in write(cloud, "gated").run().origins
    assert len([text for text in said if "was lost" in text]) == 3 and len(said) <= 6


@pytest.mark.parametrize("plan", ["gated", "cloud"])
@pytest.mark.parametrize("wire", WIRES)
def test_a_server_that_comes_back_as_another_model_writes_no_token_of_the_text(wire: str, plan: str) -> None:
    with line(wire, token_s=0.01) as each, known(each, 5.0) as cloud:
        tokens = killed(each, generation := write(cloud, plan), LENGTH // 4)
        each.become(letters("toy:drift=0.9"))
        each.start()
        try:
            list(tokens)
        except SkydraftError as error:
            assert_one_clear_line(error)
        else:
            assert plan == "gated"
        assert_all_is_accounted_for(generation)
