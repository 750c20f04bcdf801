"""What is told of requests, bytes and money is never less than what came to the server, whatever goes wrong; and beyond
a limit nothing comes there."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft.decoding.accounts.prices import Prices
from skydraft.edge.budget import Budget
from skydraft.edge.stock.ledger import Ledger, Request
from skydraft.edge.stock.wire import Pool, Wire, as_json
from skydraft.errors import BudgetSpent, CloudLost, SkydraftError
from skydraft.types import LinkCost
from tests.edge.test_receipt import figures, of_what_came
from tests.hostile.lines import known
from tests.hostile.texts import STREAMS, TARGET, TEXT, assert_all_is_accounted_for, write
from tests.stock import faults
from tests.stock.answering import Asked
from tests.stock.fakes import GENERATING, IDS, Fake, fake
from tests.stock.faults import Fault
from tests.toys import law

PROMPT = list(TARGET.vocab.encode(TEXT))
DIALECTS = (*IDS, "openai")
ROWS = [(dialect, plan) for dialect in IDS for plan in ("gated", "cloud", "checked")]
ROWS += [("openai", plan) for plan in STREAMS]
FATES: dict[str, Fault] = {
    "": faults.SOUND, "500": faults.refuses(500), "503": faults.refuses(503), "silent": faults.silent(),
    "429": faults.refuses(429, Retry_After="0"), "hangs up": faults.hangs_up(), "hangs up late": faults.hangs_up(1.5),
    **{f"cut {num}": faults.cut(num, 20) for num in (0, 1, 7)},
}  # fmt: skip
PRICES = Prices(1.0, 2.0, 3.0)


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[[str], Fake]]:
    with ExitStack() as stack:
        yield cache(lambda dialect: stack.enter_context(fake(dialect, TARGET)))


def connect(server: Fake, timeout_s: float = 10.0, price: str = "1,2,3", **how: Any) -> Any:
    return closing(skydraft.connect(server.url, timeout_s=timeout_s, price=price, **how))


def num_read(asked: Asked) -> int:
    body = json.loads(asked.came)
    return len(body.get("prompt") or body.get("input_ids") or PROMPT)  # a chat's text is this one


def price(asked: list[Asked], *, waits: bool = True) -> float:
    """At least so much: of answers that the client did not wait for, what was written is not certain."""
    written = [each.num_written if waits and each.is_sound else 0 for each in asked]
    return sum(
        PRICES.total(each.cached, num_read(each) - each.cached, num) for each, num in zip(asked, written, strict=True)
    )


def spent(cloud: Any) -> float:
    cost: float = cloud.servers.all[0].budget.cost
    return cost


@law(40)
@given(st.sampled_from(ROWS), st.lists(st.sampled_from(["", *FATES]), max_size=7), st.sampled_from([None, 1, 3, 6]))
def test_no_less_is_told_than_came(servers: Callable[[str], Fake], row: Any, fates: list[str], most: Any) -> None:
    (dialect, plan), texts = row, []
    server = servers(dialect)
    server.wait_until_idle()
    server.faults.clear()
    with connect(server, 0.7, max_calls=most) as cloud:
        cloud.ping(5.0)
        begun = len(server.model.asked)
        own = cloud.servers.all[0].wire.ledger.spent
        server.faults += [FATES[each] for each in fates]
        for _ in range(2):
            generation = write(cloud, plan, raw=dialect in IDS, length=16)
            with suppress(SkydraftError):
                generation.run()
            generation.close()
            texts.append(generation)
        receipts = [text.receipt for text in texts]
        own = cloud.servers.all[0].wire.ledger.spent - own
    server.wait_until_idle()
    came = server.model.asked[begun:]
    calls, waits = [asked for asked in came if asked.path in GENERATING], plan == "cloud"
    assert most is None or len(calls) <= most
    assert sum(receipt.calls for receipt in receipts) >= len(calls)
    assert sum(receipt.bytes_up for receipt in receipts) + own.bytes_up >= sum(len(asked.came) for asked in came)
    told = sum(receipt.cost or 0.0 for receipt in receipts)
    assert min(told, spent(cloud)) + 1e-12 >= price(calls, waits=waits)
    written = [origin for text in texts for origin in text.origins if origin in ("cloud", "recovered", "bonus")]
    assert sum(text.stats.tokens_out for text in texts) >= len(written)  # also of answers that were cut or left


# (whether an older connection may be used, what becomes of the first request, calls that may be made, what is raised)
ALONE: list[tuple[bool, str, int, list[type[Exception]]]] = [
    *((False, fate, 1, [CloudLost, BudgetSpent]) for fate in ("cut 0", "hangs up")),
    (False, "silent", 1, [TimeoutError, BudgetSpent]), (True, "hangs up late", 1, [CloudLost, BudgetSpent]),
    (True, "hangs up", 1, [BudgetSpent, BudgetSpent]), (True, "hangs up", 2, [BudgetSpent]),
]  # fmt: skip


@pytest.mark.parametrize(("is_old", "fate", "most", "raised"), ALONE)
def test_an_answer_in_one_piece_that_is_lost(is_old: bool, fate: str, most: int, raised: Any) -> None:
    """It costs what was written, perhaps, and is asked for again only where the server may have closed the connection
    before it read it. Both times count, and the second one needs leave."""
    ledger, errors = Ledger(Budget(max_calls=most), "it", len(PROMPT)), list[type[Exception]]()

    async def ask(url: str) -> None:
        pool = Pool(url, None, None, is_here=True)
        wire, body = Wire(url, f"{url}/v1", pool, ledger), as_json({"prompt": PROMPT, "n_predict": 1})
        if is_old:
            await wire.ask("/v1/models", 5.0)
        for _ in range(2):
            try:
                await asyncio.wait_for(wire.whole(Request(ledger, "/completion", body, PROMPT, num_written=1)), 2.0)
            except (SkydraftError, TimeoutError) as error:
                errors.append(type(error))
        await pool.close()

    with fake("llama-server", TARGET) as server:
        server.faults.append(FATES[fate])
        asyncio.run(ask(server.url))
        spent, asked = ledger.spent, server.generating
    assert errors == raised and len(asked) == ledger.sent.num_calls == spent.num_requests == most
    assert spent.bytes_up == sum(len(each.came) for each in asked)
    assert (spent.tokens_in, spent.tokens_out) == (most * len(PROMPT), 1)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_neither_a_first_contact_nor_what_never_left_is_a_call(dialect: str) -> None:
    with fake(dialect, TARGET) as server, connect(server, max_calls=1) as cloud:
        facts = cloud.facts(None)
        assert facts and facts.name == "toy" and not server.model.num_written and spent(cloud) == 0
        server.kill()
        receipt = write(cloud, "lossless", raw=dialect in IDS).run().receipt
        assert receipt.calls == receipt.bytes_up == spent(cloud) == 0
        server.start()
        assert write(cloud, "cloud", raw=dialect in IDS).run().receipt.calls == 1


def test_calls_that_fail_cost_what_was_sent() -> None:
    with fake("vllm", TARGET) as server, connect(server) as cloud:
        assert cloud.facts(None) is not None
        server.storm(FATES["500"])
        receipt = write(cloud, "gated").run().receipt
    asked = server.generating
    assert receipt.calls == len(asked) > 1
    assert receipt.bytes_up >= sum(len(each.came) for each in asked) > 0
    assert receipt.cost == pytest.approx(sum(2.0 * num_read(each) for each in asked) / 1e6)


USAGE = {"prompt_tokens": 1000, "completion_tokens": 200, "prompt_tokens_details": {"cached_tokens": 600}}
HIDDEN = {"prompt_tokens": 32, "completion_tokens": 9, "total_tokens": 135}
TOLD: list[tuple[str, Any, tuple[int, int, int]]] = [
    *((dialect, {"choices": [], "usage": USAGE}, (1000, 600, 200)) for dialect in ("vllm", "openai")),
    ("openai", {"choices": [], "usage": HIDDEN}, (32, 0, 103)),  # xAI, Gemini: thoughts that nobody sees
    # Moonshot counts in the choice.
    ("openai", {"choices": [{"index": 0, "delta": {}, "usage": HIDDEN | {"total_tokens": 41}}]}, (32, 0, 9)),
    ("openai", {"choices": [], "usage": {"total_tokens": 135}}, (2, 0, 1)),
    # No price can be made of these: a text ended with a traceback.
    ("openai", {"choices": [], "usage": {"prompt_tokens": 2**31, "completion_tokens": 10**4000}}, (2, 0, 1)),
]


@pytest.mark.parametrize(("dialect", "last", "counts"), TOLD, ids=str)
def test_larger_own_counts_are_paid(dialect: str, last: Any, counts: tuple[int, int, int]) -> None:
    """A server has a template of its own, and other tokens."""
    tokens = {"token_ids": [5], "text": "语"} if dialect == "vllm" else {"delta": {"content": "语"}}
    events = [{"choices": [{"index": 0, **tokens, "finish_reason": "stop"}]}, last]
    with fake(dialect, TARGET) as server, connect(server) as cloud:
        server.faults.append(faults.tells(*events))
        generation = write(cloud, "cloud", raw=dialect == "vllm", length=1).run()
        receipt, stats = generation.receipt, generation.stats
    num_read, num_cached, num_written = counts
    assert (stats.tokens_in, stats.tokens_hit, stats.tokens_out) == counts
    assert receipt.cost == stats.cost == pytest.approx(PRICES.total(num_cached, num_read - num_cached, num_written))
    assert stats.cached_tokens.cloud <= generation.num_prompt_tokens


def without(name: str, said: Any = 7) -> Fault:
    return faults.retells_json(lambda event: {**event, name: said, "choices": [{name: said}]})


UNREAD: list[tuple[str, Fault]] = [
    *((dialect, faults.retells(lambda event: b"data: {\n\n")) for dialect in DIALECTS),
    *zip(DIALECTS, map(without, ("token_ids", "tokens", "output_ids", "delta")), strict=True),
    # Each event of SGLang may tell all tokens again: the count says which are new, and they came twice.
    *(("sglang", without("meta_info", {"completion_tokens": said})) for said in (0, -5, "3", None, True)),
]


@pytest.mark.parametrize(("dialect", "fault"), UNREAD)
def test_what_cannot_be_read_is_no_text_and_is_paid(dialect: str, fault: Fault) -> None:
    """72 tokens of three requests were told as 0."""
    with fake(dialect, TARGET) as server, connect(server, 5.0) as cloud:
        server.storm(fault)
        generation = write(cloud, "cloud", raw=dialect in IDS, length=24)
        with pytest.raises(SkydraftError):
            generation.run()
        server.wait_until_idle()
        wrote = server.model.num_written
        least = PRICES.total(0, 0, wrote) - 1e-12
        assert cloud.spent.tokens_out >= wrote > 0 and spent(cloud) >= least and generation.receipt.cost >= least
        alone = write(cloud, "lossless" if dialect == "openai" else "gated", raw=dialect in IDS).run()
        assert_all_is_accounted_for(alone)
        assert "edge-fallback" in alone.origins


# --- Limits of a day


# (day, whether a call may be made then), one after the other; 1 is the limit of a day, and so is what it costs.
@pytest.mark.parametrize("most", [{"max_calls": 1}, {"prices": PRICES, "max_cost": 3.0}])
@pytest.mark.parametrize("days", [[(100.9, True), (101.1, True), (101.9, False)], [(100.5, True), (99.5, False)]])
def test_calls_of_a_day_are_no_more_with_any_clock(days: Any, most: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    budget, taken = Budget(**most), list[int]()
    for day, may_ask in days:
        monkeypatch.setattr(time, "time", lambda day=day: day * 86400)
        before = len(taken)
        with suppress(BudgetSpent):
            taken.append(budget.take())
            budget.pay(LinkCost(tokens_out=10**6))
            budget.give_back(taken[0] - 1)  # of another day
        assert len(taken) == before + may_ask


# --- What was sent


@pytest.mark.parametrize("plan", ["gated", "cloud", "checked"])
@pytest.mark.parametrize("dialect", IDS)
def test_a_receipt_is_what_the_server_was_asked(dialect: str, plan: str) -> None:
    with fake(dialect, TARGET) as server, known(server, 5.0) as cloud:
        begun = len(server.model.asked)
        generation = write(cloud, plan).run()
        asked = [each for each in server.model.asked[begun:] if each.prompts]
    num_prompt = len(generation.request.prompts.target.token_ids)
    got = {each for one in asked for told in one.prompts for each in enumerate(told[num_prompt:])}
    assert figures(generation.receipt) == of_what_came(generation, num_prompt, got, len(asked))
    assert generation.receipt.servers == (cloud.name,)
