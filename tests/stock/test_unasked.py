"""Servers that answer something else than they were asked: other numbers of choices, another order, no end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from skydraft.edge.stock.meeting import Met
from skydraft.errors import SkydraftError
from tests.hostile.texts import ALONE, LENGTH, TARGET, assert_all_is_accounted_for, assert_one_clear_line, write
from tests.serving import PATIENCE_S, Unhurried
from tests.stock import faults
from tests.stock.fakes import fake
from tests.stock.test_hostile import known, storm

Change = Callable[[list[Any]], list[Any]]
HARMLESS: dict[str, Change] = {"another order": lambda given: given[::-1]}  # each says which one it is
HARMFUL: dict[str, Change] = {
    "none": lambda given: [],
    "one too few": lambda given: given[:-1],
    "one too many": lambda given: [*given, {**given[-1], "index": len(given)}],
    "one twice": lambda given: [given[0], *given[:-1]],
    "all the same number": lambda given: [{**choice, "index": 0} for choice in given],
    "numbers that are words": lambda given: [{**choice, "index": str(choice["index"])} for choice in given],
    "two tokens each": lambda given: [{**choice, "token_ids": choice["token_ids"] * 2} for choice in given],
    "no token": lambda given: [{**choice, "token_ids": []} for choice in given],
    "words": lambda given: ["choice" for _ in given],
}


@pytest.mark.parametrize("name", [*HARMLESS, *HARMFUL])
def test_choices_of_a_fan_out_that_were_not_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Met, "checks", lambda self, num: num > 0)
    monkeypatch.setattr("skydraft.edge.cloud.Patience", Unhurried)
    with fake("vllm", TARGET) as server, known(server, PATIENCE_S) as cloud:
        storm(server, faults.answers((HARMLESS | HARMFUL)[name]), after=0)
        generation = write(cloud, "gated")
        generation.run()
        assert ("edge-fallback" in generation.origins) == (name in HARMFUL)
        assert len(generation.token_ids) == LENGTH
        assert_all_is_accounted_for(generation)


@pytest.mark.parametrize("plan", ["gated", "cloud", "checked"])
@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llama-server"])
def test_a_stream_that_never_stops_is_hung_up_on(dialect: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Met, "checks", lambda self, num: False)
    with fake(dialect, TARGET, token_s=0.001) as server, known(server, 5.0) as cloud:
        storm(server, faults.ENDLESS, after=0)
        before, generation = server.model.num_written, write(cloud, plan)
        try:
            generation.run()
        except SkydraftError as error:
            assert_one_clear_line(error)
            assert generation.token_ids == ALONE[: len(generation.token_ids)]
        assert_all_is_accounted_for(generation)
        server.wait_until_idle()
        assert server.model.num_written - before < 100 * LENGTH


@pytest.mark.parametrize("part", [b"data: " + b"7" * 65536, b" " * 65536, b"data: {}\n\n" * 6000])
@pytest.mark.parametrize("plan", ["gated", "cloud"])
def test_gigabytes_are_not_read_to_the_end_of_patience(part: bytes, plan: str) -> None:
    """What is too long for an answer is noticed by its length, long before the time is over."""
    sent: list[int] = []
    with fake("vllm", TARGET) as server, known(server, PATIENCE_S) as cloud:
        storm(server, faults.floods(part, sent=sent), after=0)
        generation = write(cloud, plan)
        try:
            for _ in zip(generation, range(4), strict=False):
                pass
        except SkydraftError as error:
            assert_one_clear_line(error)
        generation.close()
        assert sum(sent) < 256 << 20


@pytest.mark.parametrize("plan", ["gated", "cloud", "checked"])
@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llama-server"])
def test_a_receipt_is_what_the_server_was_asked(dialect: str, plan: str) -> None:
    with fake(dialect, TARGET) as server, known(server, 5.0) as cloud:
        begun = len(server.model.asked)
        generation = write(cloud, plan)
        generation.run()
        prompt, text = list(generation.prompts.target.token_ids), list(enumerate(generation.token_ids))
        sent = [each for each in server.model.asked[begun:] if each.prompts]
        # Beside them the server may be measured, with a text that is nobody's.
        asked = [each for each in sent if all(told[: len(prompt)] == prompt for told in each.prompts)]
    got = {each for one in asked for told in one.prompts for each in enumerate(told[len(prompt) :])}
    receipt = generation.receipt
    mine = [origin in ("recovered", "bonus", "cloud") for origin in generation.origins]
    seen = [at for (at, token_id), is_its_own in zip(text, mine, strict=True) if is_its_own or (at, token_id) in got]
    assert [at for span in receipt.seen for at in range(*span.tokens)] == seen
    assert {(each.at, each.token_id) for each in receipt.rejected} == got - set(text)
    assert (receipt.prompt_tokens, receipt.servers) == (len(prompt), (cloud.name,))
    assert receipt.calls == len(asked)
