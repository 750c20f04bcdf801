"""A text over a link costs no more rows than it needs, in blocks of any length, and differs in nothing."""

import random
import time
from contextlib import closing
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.engines.base import Engine
from skydraft.engines.toy import open_toy

from ..serving import serving, waiting


def counting(target: Engine, rows: list[int]) -> Engine:
    forward = target.forward

    def counted(feeds: Any, **options: Any) -> Any:
        feeds = list(feeds)
        rows.append(sum(len(feed) for _, feed in feeds))
        return forward(feeds, **options)

    target.forward = counted  # type: ignore[method-assign]
    return target


@pytest.mark.parametrize(("number", "context_len"), [(0, 4096), (1, 4096), (2, 650), (3, 300)])
def test_a_prompt_is_read_once_and_nothing_is_fed_twice(number: int, context_len: int) -> None:
    """A server spends the rows of the prompt and those of the tokens and of drafts that do not stand, none besides. A
    draft model whose context is shorter than the text, or than the prompt, drafts as far as it can."""
    rows = list[int]()
    prompt = "".join(random.Random(number).choices("今天气很好我们去公园走", k=320))
    params = DecodingParams(max_new_tokens=80, min_new_tokens=80, temperature=0.8, seed=number)
    given = {"edge": open_toy("toy:drift=0.2", context_len), "params": params, "raw": True}
    target = waiting(counting(open_toy("toy"), rows), lambda: time.sleep(0.004))
    with serving(target) as server, closing(skydraft.connect(server.address)) as cloud:
        generation = skydraft.generate(prompt, cloud=cloud, plan=make_plan("lossless"), **given).run()  # type: ignore[arg-type]
    assert generation.num_prompt_tokens >= 320
    assert generation.stats.num_accepted_tokens > 4 or context_len == 300
    assert sum(rows) == generation.num_prompt_tokens - 1 + sum(each.num_draft + 1 for each in generation.records)
    alone = skydraft.generate(prompt, cloud=open_toy("toy"), plan=make_plan("cloud"), **given).run()  # type: ignore[arg-type]
    assert generation.token_ids == alone.token_ids


@pytest.mark.parametrize("drift", [0.0, 0.02, 0.2])
@pytest.mark.parametrize("plan", [make_plan("lossless", k=12), make_plan("lossless", k=12, hand_back="3")])
def test_of_a_block_too_long_the_first_part_is_judged(plan: Any, drift: float, monkeypatch: pytest.MonkeyPatch) -> None:
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
