"""A text over a link goes between drafting and streaming, in blocks of any length, and costs no more and differs in
nothing."""

import itertools
import random
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.decoding.block_length import AutoTurns
from skydraft.engines.base import Engine
from skydraft.engines.toy import open_toy
from skydraft.types import WRITE_ALL, Round

from .. import reference, toys
from ..serving import Leash, Relay, Serving, serving
from ..toys import PROMPT, PROMPT_IDS, law

AUTO = make_plan("lossless")
MOST = 40  # tokens of a text


@contextmanager
def lengths(
    phases: Iterable[tuple[int, int]], to_write: int = 0, *, reads: bool = False, leash: Leash | None = None
) -> Iterator[None]:
    """Let AutoTurns draft blocks of k for so many rounds, or stream, where k is 0, and so on.

    Where it drafts, the target may write `to_write` tokens after a correction. With `reads` the draft model reads
    along all the time. The target's leash hears of each round.
    """
    left = [[k, num_rounds] for k, num_rounds in phases] + [[0, 10**9]]

    def observe(self: AutoTurns, done: Round) -> None:
        if leash:
            leash.read()
        left[0][1] -= (done.record.num_draft > 0) == (left[0][0] > 0)
        if not left[0][1]:
            del left[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoTurns, "longest", lambda self: left[0][0])
        patch.setattr(AutoTurns, "to_write", lambda self: to_write if left[0][0] else WRITE_ALL)
        patch.setattr(AutoTurns, "reads", reads)
        patch.setattr(AutoTurns, "read", lambda self, agrees: None)
        patch.setattr(AutoTurns, "is_enough", lambda self, signals: False)
        patch.setattr(AutoTurns, "observe", observe)
        yield


def counting(target: Engine, rows: list[int]) -> Engine:
    forward = target.forward

    def counted(feeds: Any, **options: Any) -> Any:
        feeds = list(feeds)
        rows.append(sum(len(feed) for _, feed in feeds))
        return forward(feeds, **options)

    target.forward = counted  # type: ignore[method-assign]
    return target


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(toys.toy(4)) as running:
        yield running


@pytest.fixture(scope="module")
def cloud(server: Serving) -> Iterator[Any]:
    with closing(skydraft.connect(server.address)) as connected:
        yield connected


def write(cloud: Any, params: DecodingParams, drift: float = 0.4) -> Generation:
    return skydraft.generate(PROMPT, edge=toys.toy(4, drift), cloud=cloud, plan=AUTO, params=params, raw=True).run()


@law(40)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=12), st.sampled_from([0.0, 0.8]),
    st.integers(0, 2**32), st.sampled_from([0.0, 0.4, 50.0]), st.sampled_from([0, 2, WRITE_ALL]), st.booleans(),
)  # fmt: skip
def test_lossless_writes_what_the_target_writes_whenever_it_switches(
    cloud: Any, chosen: list[tuple[int, int]], temperature: float, seed: int, drift: float, to_write: int, reads: bool
) -> None:
    params = DecodingParams(max_new_tokens=MOST, temperature=temperature, seed=seed)
    with lengths(chosen, to_write, reads=reads):
        generation = write(cloud, params, drift)
    assert (generation.token_ids, generation.finish_reason) == reference.plain(toys.toy(4), PROMPT_IDS, params)
    assert {"cloud", "accepted", "bonus", "recovered"} >= set(generation.origins)


def test_it_does_switch_and_every_byte_of_it_is_counted() -> None:
    params, leash = DecodingParams(max_new_tokens=MOST, min_new_tokens=MOST), Leash()
    with (
        serving(leash.put_on(toys.toy(4))) as server,
        Relay(server.address) as relay,
        closing(skydraft.connect(relay.address)) as cloud,
        lengths([(0, 3), (3, 2)] * 9, leash=leash),
    ):
        generation = write(cloud, params)
    assert {"verify", "stop"} <= {name for name, _ in relay.requests}
    messages = [
        sum(len(data) for name, data in each if name not in ("close", "GetInfo", "Check"))
        for each in (relay.requests, relay.replies)
    ]
    assert [generation.stats.bytes_up, generation.stats.bytes_down] == messages
    for is_drafted in (True, False):
        assert sum((record.num_draft > 0) == is_drafted for record in generation.records) > 3


@pytest.mark.parametrize("number", range(4))
def test_a_prompt_is_read_once_however_often_a_text_switches(number: int) -> None:
    """A server spends the rows of the prompt and those of the blocks and the tokens, and none besides."""
    rows, leash = list[int](), Leash()
    prompt = "".join(random.Random(number).choices("今天气很好我们去公园走", k=320))
    params = DecodingParams(max_new_tokens=80, min_new_tokens=80, temperature=0.8, seed=number)
    given = {"edge": open_toy("toy:drift=0.2"), "params": params, "raw": True}
    with (
        serving(leash.put_on(counting(open_toy("toy"), rows))) as server,
        closing(skydraft.connect(server.address)) as cloud,
        lengths([(0, 10), (4, 4), (0, 10), (4, 99)], leash=leash),
    ):
        generation = skydraft.generate(prompt, cloud=cloud, plan=AUTO, **given).run()  # type: ignore[arg-type]
    blocks = [record.num_draft for record in generation.records]
    switches = sum((one > 0) != (other > 0) for one, other in itertools.pairwise(blocks))
    assert switches == 3 and generation.num_prompt_tokens >= 320
    assert sum(rows) <= generation.num_prompt_tokens + sum(num_draft + 1 for num_draft in blocks)
    alone = skydraft.generate(prompt, cloud=open_toy("toy"), plan=make_plan("cloud"), **given).run()  # type: ignore[arg-type]
    assert generation.token_ids == alone.token_ids


@pytest.mark.parametrize("drift", [0.0, 0.02, 0.2])
@pytest.mark.parametrize("plan", [make_plan("lossless", k=12), make_plan("lossless", k=12, hand_back="3")])
def test_of_a_block_that_is_longer_than_the_server_takes_the_first_part_is_judged(
    plan: Any, drift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skydraft.edge.cloud._FACTS_S", 0.0)  # two minutes later
    params = DecodingParams(max_new_tokens=60, temperature=0.8, seed=3)
    given = {"edge": open_toy(f"toy:drift={drift}"), "plan": plan, "params": params}
    near = skydraft.generate("语速", cloud=open_toy("toy"), **given).run()
    with serving(open_toy("toy"), max_block=4) as server, closing(skydraft.connect(server.address)) as cloud:
        far, again = (skydraft.generate("语速", cloud=cloud, **given).run() for _ in range(2))
    assert (far.token_ids, far.finish_reason) == (near.token_ids, near.finish_reason)
    for done in (*far.rounds_so_far, *again.rounds_so_far):  # the second time it is known
        assert done.record.num_draft == len(done.block.token_ids) <= 4
        if done.origins[-1] == "recovered":  # a token that was not drafted; after the part that stands comes a bonus
            assert done.token_ids[-1] != done.block.token_ids[done.record.num_accepted]
    assert again.token_ids == far.token_ids and (drift or far.stats.acceptance_rate == 1)
    assert [done.receipt.calls - done.stats.num_escalated for done in (far, again)] == [1, 0]  # refused calls
