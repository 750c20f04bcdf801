"""What an adaptive block length asks a server before its first token: once, not for each text."""

from __future__ import annotations

import random
from contextlib import closing
from typing import Any

import pytest

import skydraft
from skydraft.config import DecodingParams
from skydraft.decoding.block_length import AutoK
from skydraft.decoding.plan import make_plan
from skydraft.edge.link import Link
from skydraft.engines.toy import open_toy

from ..serving import serving


def test_costs_are_asked_for_now_and_then(monkeypatch: pytest.MonkeyPatch, as_shipped: None) -> None:
    asked: list[str] = []
    plain = Link.call

    def noted(self: Link, method: str, *args: Any, **options: Any) -> bytes:
        asked.append(method)
        return plain(self, method, *args, **options)

    monkeypatch.setattr(Link, "call", noted)
    params, edge, target = DecodingParams(max_new_tokens=12), open_toy("toy:drift=0.2"), open_toy("toy")

    def write(side: Any) -> tuple[int, ...]:
        return (
            skydraft.generate("语速", edge=edge, cloud=side, plan=make_plan("lossless"), params=params).run().token_ids
        )

    with serving(open_toy("toy")) as server, closing(skydraft.connect(server.address)) as cloud:
        texts = {write(cloud) for _ in range(3)}
        assert texts == {write(target)}
        assert asked.count("GetInfo") == 1
        assert cloud._costs is not None
        cloud._costs = (cloud._costs[0] - 3600, *cloud._costs[1:])
        write(cloud)
        assert asked.count("GetInfo") == 2


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_text_that_goes_between_drafting_and_streaming_is_that_of_the_target(
    monkeypatch: pytest.MonkeyPatch, as_shipped: None, temperature: float
) -> None:
    """As `lossless` does by itself when costs change: the session goes from one kind of call to another."""
    lengths = random.Random(3)
    monkeypatch.setattr(AutoK, "longest", lambda self: lengths.choice([0, 0, 3, 5]))
    monkeypatch.setattr(AutoK, "is_enough", lambda self, signals: False)
    edge, target = open_toy("toy:drift=0.2"), open_toy("toy")
    with serving(open_toy("toy")) as server, closing(skydraft.connect(server.address)) as cloud:
        num_drafted = num_streamed = 0
        for number in range(6):
            params = DecodingParams(max_new_tokens=60, temperature=temperature, seed=number)
            alone, done = (
                skydraft.generate(f"语速{number}", edge=edge, cloud=side, plan=make_plan(mode), params=params).run()
                for mode, side in (("cloud", target), ("lossless", cloud))
            )
            assert done.token_ids == alone.token_ids
            num_drafted += sum(record.num_draft > 0 for record in done.records)
            num_streamed += sum(record.num_draft == 0 for record in done.records)
        assert min(num_drafted, num_streamed) > 20
