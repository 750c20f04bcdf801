"""Another model behind the same port must not go on with a text that the first one began."""

from collections.abc import Iterator
from contextlib import closing, nullcontext
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, Generation
from skydraft.edge.cloud import Cloud
from skydraft.engines.toy import open_toy
from skydraft.errors import TargetChanged

from ..hostile.texts import committed
from ..serving import free_port, serving
from .texts import ALONE, GATED, LOSSLESS, Start, begin, connected, home, undisturbed

LENGTH = 2000  # a stream is read ahead: it must not be over before its server is
LONG = DecodingParams(max_new_tokens=LENGTH, min_new_tokens=LENGTH)


def begun(cloud: Cloud, plan: Any) -> tuple[Generation, Iterator[Any]]:
    generation = begin(cloud, plan, LONG)
    rounds = generation.rounds()
    for _ in range(4):
        next(rounds)
    return generation, rounds


CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "another model": (lambda: open_toy("toy:drift=0.4"), {}),
    "another execution": (lambda: open_toy("toy", 3000), {"execution": "throughput"}),
    "a smaller context": (lambda: open_toy("toy", 2500), {}),
    "more room": (lambda: open_toy("toy"), {}),
}


@pytest.mark.parametrize(("change", "plan"), [*((each, LOSSLESS) for each in CHANGES), ("more room", ALONE)])
def test_a_text_stops_where_the_target_changes_and_goes_on_with_more_room(change: str, plan: Any) -> None:
    (made, options), port = CHANGES[change], free_port()
    with closing(skydraft.connect(f"127.0.0.1:{port}", timeout_s=10, require=True)) as cloud:
        with serving(open_toy("toy", 3000), port=port):
            generation, rounds = begun(cloud, plan)
        is_same = nullcontext() if change == "more room" else pytest.raises(TargetChanged, match="text was begun with")
        with serving(made(), port=port, **options), is_same:
            list(rounds)
    written = committed(generation)
    assert written == undisturbed(plan, LONG)[: len(written)]
    assert 4 <= len(written) <= LENGTH and (len(written) == LENGTH) == (change == "more room")


@pytest.mark.parametrize("plan", [LOSSLESS, GATED], ids=["lossless", "gated"])
def test_of_two_servers_a_text_goes_on_at_the_unchanged_one(start: Start, plan: Any, unhurried: None) -> None:
    ports = [free_port(), free_port()]
    servers = [start(port=port) for port in ports]
    with closing(connected(servers)) as cloud:
        generation = begin(cloud, plan)
        rounds = generation.rounds()
        while not generation.stats.num_escalated:
            next(rounds)
        there, _other = home(servers)
        there.stop()
        changed = start(open_toy("toy:drift=0.4"), port=there.port)
        list(rounds)
        assert generation.token_ids == undisturbed(plan) and "edge-fallback" not in generation.origins
        assert (changed.num_sessions, len(generation.token_ids)) == (0, 80)
        for _ in range(6):
            assert begin(cloud, plan).run().token_ids == undisturbed(plan)


def test_when_all_servers_of_a_list_run_something_new_texts_begin_with_that(start: Start) -> None:
    ports = [free_port(), free_port()]
    servers = [start(port=port) for port in ports]
    with closing(connected(servers)) as cloud:
        generation = begin(cloud)
        rounds = generation.rounds()
        next(rounds)
        for each in servers:
            each.stop()
        for port in ports:
            start(open_toy("toy:drift=0.4"), port=port)
        with pytest.raises(TargetChanged, match="begun with"):
            list(rounds)
        expected = begin(open_toy("toy:drift=0.4")).run().token_ids
        assert expected != undisturbed()
        for plan in (LOSSLESS, ALONE) * 3:
            assert begin(cloud, plan).run().token_ids == expected
        assert cloud.info().model == "toy:drift=0.4"
