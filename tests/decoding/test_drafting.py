"""The draft model's side: what it reads of a text that others wrote, and whom that holds up."""

from __future__ import annotations

from typing import Any

import pytest

from skydraft.config import DecodingParams
from skydraft.decoding.context import Context
from skydraft.decoding.drafting import Drafter
from skydraft.types import DraftBlock, Verdict
from tests import toys

PARAMS = DecodingParams(max_new_tokens=500, min_new_tokens=500)


def test_a_long_text_that_others_wrote_is_read_in_parts_between_which_others_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, context = toys.toy(1), Context(toys.ASKED)
    drafter = Drafter(engine, toys.ASKED, PARAMS, 500)
    drafter.draft(context, 3)
    for number in range(300):
        token_id = 3 + number % 5
        context.commit_verdict(DraftBlock(context.base, ()), Verdict(context.base, 0, token_id))
    held: list[int] = []  # rows that were fed each time somebody had the floor
    acquire, forward = engine.floor.acquire, engine.forward
    monkeypatch.setattr(engine.floor, "acquire", lambda: (held.append(0), acquire()))

    def counted(feeds: Any, **options: Any) -> Any:
        held[-1] += sum(len(feed) for _, feed in feeds)
        return forward(feeds, **options)

    monkeypatch.setattr(engine, "forward", counted)
    block = drafter.draft(context, 4)
    assert sum(held) == block.cost.num_rows >= 300
    assert max(held) <= engine.invariant_rows + 16 + 4 and len(held) >= 4
    fresh = Drafter(toys.toy(1), toys.ASKED, PARAMS, 500)
    assert fresh.draft(context, 4).token_ids == block.token_ids
