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
