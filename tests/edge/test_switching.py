"""A text over a link goes between drafting and streaming, in blocks of any length, and costs no more and differs in
nothing."""

import itertools
import random
from contextlib import closing
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.decoding.block_length import AutoTurns
from skydraft.engines.base import Engine
from skydraft.engines.toy import open_toy
from skydraft.types import WRITE_ALL, Round

from ..serving import Leash, serving


def counting(target: Engine, rows: list[int]) -> Engine:
    forward = target.forward

    def counted(feeds: Any, **options: Any) -> Any:
        feeds = list(feeds)
        rows.append(sum(len(feed) for _, feed in feeds))
        return forward(feeds, **options)

    target.forward = counted  # type: ignore[method-assign]
    return target


@pytest.mark.parametrize("number", range(4))
def test_a_prompt_is_read_once_however_often_a_text_switches(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server spends the rows of the prompt and those of the blocks and the tokens, and none besides."""
    rows, leash = list[int](), Leash()
    left = [[0, 10], [4, 4], [0, 10], [4, 99]]  # blocks of k for so many rounds, or streaming, where k is 0

    def observe(self: AutoTurns, done: Round) -> None:
        leash.read()
        left[0][1] -= (done.record.num_draft > 0) == (left[0][0] > 0)
        if not left[0][1]:
            del left[0]

    monkeypatch.setattr(AutoTurns, "longest", lambda self: left[0][0])
    monkeypatch.setattr(AutoTurns, "to_write", lambda self: 0 if left[0][0] else WRITE_ALL)
    monkeypatch.setattr(AutoTurns, "reads", False)
    monkeypatch.setattr(AutoTurns, "is_enough", lambda self, signals: False)
    monkeypatch.setattr(AutoTurns, "observe", observe)
    prompt = "".join(random.Random(number).choices("今天气很好我们去公园走", k=320))
    params = DecodingParams(max_new_tokens=80, min_new_tokens=80, temperature=0.8, seed=number)
    given = {"edge": open_toy("toy:drift=0.2"), "params": params, "raw": True}
    target = leash.put_on(counting(open_toy("toy"), rows))
    with serving(target) as server, closing(skydraft.connect(server.address)) as cloud:
        generation = skydraft.generate(prompt, cloud=cloud, plan=make_plan("lossless"), **given).run()  # type: ignore[arg-type]
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
