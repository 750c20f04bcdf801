"""Servers that answer without an end, and what a receipt says of what they were asked."""

from contextlib import closing

import pytest

import skydraft
from skydraft.errors import SkydraftError
from tests.edge.test_receipt import figures, of_what_came
from tests.hostile.lines import known
from tests.hostile.texts import LENGTH, TARGET, assert_one_clear_line, failure_of, write
from tests.serving import PATIENCE_S
from tests.stock import faults
from tests.stock.fakes import fake
from tests.stock.test_hostile import storm


@pytest.mark.parametrize("plan", ["gated", "cloud", "checked"])
@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llama-server"])
def test_a_stream_that_never_stops_is_hung_up_on(dialect: str, plan: str) -> None:
    with fake(dialect, TARGET, token_s=0.001) as server, known(server, 5.0) as cloud:
        storm(server, faults.ENDLESS, after=0)
        before = server.model.num_written
        failure_of(write(cloud, plan), plan)
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
        prompt = list(generation.prompts.target.token_ids)
        sent = [each for each in server.model.asked[begun:] if each.prompts]
        # Beside them the server may be measured, with a text that is nobody's.
        asked = [each for each in sent if all(told[: len(prompt)] == prompt for told in each.prompts)]
    got = {each for one in asked for told in one.prompts for each in enumerate(told[len(prompt) :])}
    assert figures(generation.receipt) == of_what_came(generation, len(prompt), got, len(asked))
    assert generation.receipt.servers == (cloud.name,)


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llama-server", "openai"])
def test_a_first_contact_costs_nothing(dialect: str) -> None:
    with fake(dialect, TARGET) as server, closing(skydraft.connect(server.url, price="1,2,3", max_cost=1.0)) as cloud:
        facts = cloud.facts(None)
        assert facts is not None and facts.name == "toy"
        assert not server.model.num_written and cloud.servers.all[0].budget.cost == 0  # type: ignore[attr-defined]
