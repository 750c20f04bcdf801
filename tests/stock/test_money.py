"""What is told of requests, bytes and money is never less than what came to the server, whatever goes wrong."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
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
from tests.hostile.texts import STREAMS, TARGET, TEXT, write
from tests.stock import faults
from tests.stock.fakes import GENERATING, IDS, Fake, fake
from tests.stock.front import Front, Post
from tests.toys import law

PROMPT = list(TARGET.vocab.encode(TEXT))
CHATS = ("openai", "deepseek", "gemini")
DIALECTS = (*IDS, *CHATS)
ROWS = [(dialect, plan) for dialect in IDS for plan in ("gated", "cloud", "checked")]
ROWS += [(dialect, plan) for dialect in CHATS for plan in STREAMS]
FATES = ["", "", "500", "503", "429", "hangs up", "silent", "cut 0", "cut 90", "cut 700"]
PRICES = Prices(1.0, 2.0, 3.0)


@contextmanager
def standing(dialect: str, home: Path) -> Iterator[Front]:
    with pytest.MonkeyPatch.context() as patch, fake(dialect, TARGET) as server, Front(server.url) as front:
        patch.setenv("SKYDRAFT_HOME", str(home))
        yield front


@pytest.fixture(scope="module")
def fronts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Front]]:
    with ExitStack() as stack:

        @cache
        def running(dialect: str) -> Front:
            return stack.enter_context(standing(dialect, tmp_path_factory.mktemp("home")))

        def front(dialect: str) -> Front:
            running(dialect).posts.clear()
            running(dialect).fates.clear()
            return running(dialect)

        yield front


def connect(front: Front, timeout_s: float = 10.0, **how: Any) -> Any:
    return skydraft.connect(front.url, timeout_s=timeout_s, **how)


def carries(post: Post) -> bool:
    """Whether a request carries the text: others measure, or ask what the server is."""
    given = post.prompt
    return bool(given) and (given.startswith(TEXT) if isinstance(given, str) else given[: len(PROMPT)] == PROMPT)


def num_read(post: Post) -> int:
    return len(TARGET.vocab.encode(post.prompt) if isinstance(post.prompt, str) else post.prompt)


def price(posts: list[Post], *, waits: bool = True) -> float:
    """At least so much: of answers that the client did not wait for, what was written is not certain. One that does not
    wait for the end of all may have left as an answer was cut."""
    total = 0.0
    for post in posts:
        is_certain = not post.was_left and (waits or not post.was_cut)
        num_written = post.num_written(TARGET.vocab.encode) if is_certain else 0
        total += PRICES.total(post.num_cached, num_read(post) - post.num_cached, num_written)
    return total


def spent(cloud: Any) -> float:
    cost: float = cloud.servers.all[0].budget.cost
    return cost


@law(40)
@given(st.sampled_from(ROWS), st.lists(st.sampled_from(FATES), max_size=7), st.sampled_from([None, 1, 3, 6]))
def test_no_less_is_told_than_came(fronts: Callable[[str], Front], row: Any, fates: list[str], most: Any) -> None:
    (dialect, plan), texts = row, []
    front = fronts(dialect)
    with closing(connect(front, 0.7, price="1,2,3", max_calls=most)) as cloud:
        before = spent(cloud)
        cloud.ping(5.0)
        front.fates += fates
        for _ in range(2):
            generation = write(cloud, plan, raw=dialect in IDS, length=16)
            with suppress(SkydraftError):
                generation.run()
            generation.close()
            texts.append(generation)
        own = cloud.servers.all[0].wire.ledger.spent
        receipts = [text.receipt for text in texts]
    Fake.wait_until(lambda: not front.num_open)
    calls = [post for post in front.generating if carries(post)]
    assert most is None or len(calls) <= most
    assert sum(receipt.calls for receipt in receipts) >= len(calls)
    assert sum(receipt.bytes_up for receipt in receipts) + own.bytes_up >= sum(post.num_bytes for post in front.posts)
    told = sum(receipt.cost or 0.0 for receipt in receipts)
    waits = plan == "cloud"
    assert told + 1e-12 >= price(calls, waits=waits)
    written = [origin for text in texts for origin in text.origins if origin in ("cloud", "recovered", "bonus")]
    assert sum(text.stats.tokens_out for text in texts) >= len(written)  # also of answers that were cut or left
    assert told + PRICES.of(own) + 1e-12 >= price(front.generating, waits=waits)
    assert spent(cloud) - before + 1e-12 >= price(front.generating, waits=waits)


def ask(front: Front, ledger: Ledger, *, is_known: bool = True, timeout_s: float = 5.0) -> None:
    """Ask a llama-server for one token in one piece, over a new connection unless it `is_known`."""

    async def once() -> None:
        pool = Pool(front.url, None, None, is_here=True)
        wire, body = Wire(front.url, f"{front.url}/v1", pool, ledger), {"prompt": PROMPT, "n_predict": 1}
        try:
            if is_known:
                await wire.ask("/v1/models", 5.0)
            request = Request(ledger, "/completion", as_json(body), PROMPT, num_written=1)
            await asyncio.wait_for(wire.whole(request), timeout_s)
        finally:
            await pool.close()

    asyncio.run(once())


@pytest.fixture
def front() -> Iterator[Front]:
    with fake("llama-server", TARGET) as server, Front(server.url) as front:
        yield front


@pytest.mark.parametrize(("known", "most", "calls", "error"), [
    (False, 2, 1, CloudLost), (False, 1, 1, CloudLost), (True, 2, 2, None), (True, 1, 1, BudgetSpent),
])  # fmt: skip
def test_whether_it_is_sent_again(front: Front, known: bool, most: int, calls: int, error: Any) -> None:
    """Only where the server may have closed before it read it. Both times count, and the second one needs leave: on a
    new connection the server may have read the first."""
    front.fates.append("hangs up")
    ledger = Ledger(Budget(max_calls=most), "it", len(PROMPT))
    with pytest.raises(error) if error else nullcontext():
        ask(front, ledger, is_known=known)
    assert len(front.generating) == ledger.sent.num_calls == ledger.spent.num_requests == calls
    assert ledger.spent.bytes_up == sum(post.num_bytes for post in front.generating)


# What stands between may cut an answer that takes a minute.
@pytest.mark.parametrize("fate", ["keeps", "cut 20", "silent", "hangs up 1.5"])
def test_an_answer_in_one_piece_that_is_lost_costs_what_was_written(front: Front, fate: str) -> None:
    """And it is not asked for again."""
    front.fates.append(fate)
    ledger = Ledger(Budget())
    with pytest.raises((CloudLost, TimeoutError)):
        ask(front, ledger, is_known=fate.startswith("hangs up"), timeout_s=2.0)
    assert (ledger.spent.tokens_in, ledger.spent.tokens_out) == (len(PROMPT), 1) and len(front.generating) == 1


def test_what_never_left_is_no_call() -> None:
    with fake("vllm", TARGET) as server:
        cloud = skydraft.connect(server.url, timeout_s=10, price="1,2,3", max_calls=1)
        assert cloud.facts(None) is not None
        before = spent(cloud)
        server.kill()
        generation = write(cloud, "gated").run()
        assert generation.receipt.calls == generation.receipt.bytes_up == 0 and spent(cloud) == before
        server.start()
        assert write(cloud, "cloud").run().receipt.calls == 1
        cloud.close()


def test_calls_that_fail_cost_what_was_sent(tmp_path: Path) -> None:
    with standing("vllm", tmp_path) as front, closing(connect(front, price="1,2,3")) as cloud:
        assert cloud.facts(None) is not None
        front.posts.clear()
        front.fates += ["500"] * 100
        receipt = write(cloud, "gated").run().receipt
    assert receipt.calls == len(front.generating) > 1
    assert receipt.bytes_up >= sum(post.num_bytes for post in front.generating) > 0
    assert receipt.cost == pytest.approx(sum(2.0 * num_read(post) for post in front.generating) / 1e6)


USAGE = {"prompt_tokens": 1000, "completion_tokens": 200, "prompt_tokens_details": {"cached_tokens": 600}}
HIDDEN = {"prompt_tokens": 32, "completion_tokens": 9, "total_tokens": 135}


@pytest.mark.parametrize(("dialect", "last", "counts"), [
    ("vllm", {"choices": [], "usage": USAGE}, (1000, 600, 200)),
    ("openai", {"choices": [], "usage": USAGE}, (1000, 600, 200)),
    ("openai", {"choices": [], "usage": HIDDEN}, (32, 0, 103)),  # xAI, Gemini: thoughts that nobody sees
    # Moonshot counts in the choice.
    ("openai", {"choices": [{"index": 0, "delta": {}, "usage": HIDDEN | {"total_tokens": 41}}]}, (32, 0, 9)),
    ("openai", {"choices": [], "usage": {"total_tokens": 135}}, (2, 0, 1)),
])  # fmt: skip
def test_larger_own_counts_are_paid(dialect: str, last: Any, counts: tuple[int, int, int], tmp_path: Path) -> None:
    """A server has a template of its own, and other tokens."""
    tokens = {"token_ids": [5], "text": "语"} if dialect == "vllm" else {"delta": {"content": "语"}}
    events = [{"choices": [{"index": 0, **tokens, "finish_reason": "stop"}]}, last]
    body = b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"
    with standing(dialect, tmp_path) as front, closing(connect(front, price="1,2,3")) as cloud:
        write(cloud, "cloud", raw=dialect == "vllm", length=1).run()
        front.fates.append("says " + body.decode())
        generation = write(cloud, "cloud", raw=dialect == "vllm", length=1).run()
        receipt, stats = generation.receipt, generation.stats
    num_read, num_cached, num_written = counts
    assert (stats.tokens_in, stats.tokens_hit, stats.tokens_out) == counts
    assert receipt.cost == stats.cost == pytest.approx(PRICES.total(num_cached, num_read - num_cached, num_written))
    assert stats.cached_tokens.cloud <= generation.num_prompt_tokens


UNREAD = {"vllm": "token_ids", "llama-server": "tokens", "sglang": "output_ids", "openai": "delta"}


@pytest.mark.parametrize("is_json", [True, False])
@pytest.mark.parametrize("dialect", UNREAD)
def test_what_an_answer_wrote_that_cannot_be_read_is_paid(dialect: str, is_json: bool) -> None:
    """72 tokens of three requests were told as 0."""

    def spoilt(event: Any) -> Any:
        return {**event, UNREAD[dialect]: 7, "choices": [{UNREAD[dialect]: 7}]}

    with fake(dialect, TARGET) as server, closing(skydraft.connect(server.url, timeout_s=5, price="1,2,3")) as cloud:
        fault = faults.retells_json(spoilt) if is_json else faults.retells(lambda event: b"data: {\n\n")
        server.fault_of = lambda path: fault if path in GENERATING else None
        generation = write(cloud, "cloud", raw=dialect in IDS, length=24)
        with pytest.raises(SkydraftError):
            generation.run()
        server.wait_until_idle()
        wrote = sum(asked.num_written for asked in server.model.asked)
        least = PRICES.total(0, 0, wrote) - 1e-12
        assert cloud.spent.tokens_out >= wrote > 0 and spent(cloud) >= least and generation.receipt.cost >= least
