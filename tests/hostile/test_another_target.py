"""Another model behind the same port must not go on with a text that the first one began, unless that was said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.edge.connection import Cloud
from skydraft.engines.base import Engine
from skydraft.engines.toy import open_toy
from skydraft.errors import TargetChanged
from tests.serving import free_port, serving

LENGTH = 2000  # a stream is read ahead: it must not be over before its server is
PARAMS = DecodingParams(max_new_tokens=LENGTH, min_new_tokens=LENGTH)
PLANS = {"lossless": make_plan("lossless", k=4), "cloud": make_plan("cloud")}
GATED = make_plan("quality", k=4)


def begun(cloud: Cloud, plan: Any, num_rounds: int = 4) -> tuple[skydraft.Generation, Iterator[Any]]:
    generation = skydraft.generate("语速", edge=open_toy("toy:drift=0.2"), cloud=cloud, plan=plan, params=PARAMS)
    rounds = generation.rounds()
    for _ in range(num_rounds):
        next(rounds)
    return generation, rounds


def alone(plan: Any, target: Engine) -> tuple[int, ...]:
    return (
        skydraft.generate("语速", edge=open_toy("toy:drift=0.2"), cloud=target, plan=plan, params=PARAMS)
        .run()
        .token_ids
    )


CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "another model": (lambda: open_toy("toy:drift=0.4"), {}),
    "another execution": (lambda: open_toy("toy"), {"execution": "throughput"}),
    "a smaller context": (lambda: open_toy("toy", 2500), {}),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("plan", ["lossless", "cloud"])
def test_a_lossless_text_stops_where_the_target_changes(change: str, plan: str) -> None:
    made, options = CHANGES[change]
    port = free_port()
    with serving(open_toy("toy"), port=port):
        cloud = skydraft.connect(f"127.0.0.1:{port}", timeout_s=10)
        generation, rounds = begun(cloud, PLANS[plan])
    with serving(made(), port=port, **options), pytest.raises(TargetChanged, match="not what this text was begun with"):
        for _ in rounds:
            pass
    written = generation.token_ids
    assert 4 <= len(written) < LENGTH and written == alone(PLANS[plan], open_toy("toy"))[: len(written)]
    cloud.close()


@pytest.mark.parametrize("plan", ["lossless", "cloud"])
def test_the_same_target_or_one_with_more_room_goes_on(plan: str) -> None:
    port = free_port()
    with serving(open_toy("toy", 3000), port=port):
        cloud = skydraft.connect(f"127.0.0.1:{port}", timeout_s=10)
        generation, rounds = begun(cloud, PLANS[plan])
    with serving(open_toy("toy", 4096), port=port):
        for _ in rounds:
            pass
    assert generation.token_ids == alone(PLANS[plan], open_toy("toy"))
    cloud.close()


def test_a_gated_text_goes_on_and_says_so_or_stops_where_that_was_asked_for() -> None:
    lines: list[str] = []
    for choice in ("continue", "stop"):
        port = free_port()
        with serving(open_toy("toy"), port=port):
            cloud = skydraft.connect(
                f"127.0.0.1:{port}", timeout_s=10, require=True, on_target_change=choice, notify=lines.append
            )
            generation, rounds = begun(cloud, GATED)
        with serving(open_toy("toy:drift=0.4"), port=port):
            if choice == "stop":
                with pytest.raises(TargetChanged):
                    list(rounds)
            else:
                list(rounds)
                assert len(generation.token_ids) == LENGTH
        cloud.close()
    assert len(lines) == 1 and "toy:drift=0.4" in lines[0] and "Going on with it." in lines[0]


def test_each_text_begins_with_whatever_is_there() -> None:
    port = free_port()
    cloud = skydraft.connect(f"127.0.0.1:{port}", timeout_s=10)
    for name in ("toy", "toy:drift=0.4"):
        with serving(open_toy(name), port=port):
            plan = PLANS["lossless"]
            got = skydraft.generate("语速", edge=open_toy("toy:drift=0.2"), cloud=cloud, plan=plan, params=PARAMS).run()
            assert got.token_ids == alone(plan, open_toy(name))
    cloud.close()


def test_continue_is_refused_where_a_text_always_stops(capsys: pytest.CaptureFixture[str]) -> None:
    from skydraft.cli.main import run

    command = ["generate", "a", "--edge-model", "toy", "--cloud", "localhost:1", "--on-target-change", "continue"]
    for mode in ("lossless", "cloud", "auto"):
        assert run([*command, "--mode", mode]) == 2
        assert "stops when the target changes" in capsys.readouterr().err
    assert run(["generate", "a", "--edge-model", "toy", "--on-target-change", "stop"]) == 2
    assert "about a cloud server" in capsys.readouterr().err
