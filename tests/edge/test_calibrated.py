"""The calibrated gate over a link: the same text as in one process, the pair checked by weights, and outages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.decoding.plan import Plan
from skydraft.edge.cloud import Cloud
from skydraft.engines.toy import open_toy
from skydraft.errors import CloudError, OptionError

from ..evaluation import pairs
from ..serving import PATIENCE_S, Serving, serving

DRIFT = 0.2
AUTO = make_plan("auto", gate="calibrated:0.85")
REPRODUCIBLE = make_plan("auto", gate="calibrated:0.85", hand_back="4")
PARAMS = DecodingParams(max_new_tokens=60, min_new_tokens=60)
PROMPT = pairs.prompts(1)[0]
NOWHERE = "127.0.0.1:9"
Connect = Callable[..., Cloud]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(open_toy("toy")) as running:
        yield running


@pytest.fixture
def connect() -> Iterator[Connect]:
    opened: list[Cloud] = []

    def call(address: str, **options: object) -> Cloud:
        opened.append(skydraft.connect(address, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield call
    for cloud in opened:
        cloud.close()


def start(cloud: object, prompt: str = PROMPT, params: DecodingParams = PARAMS, plan: Plan = AUTO) -> Generation:
    edge, found = pairs.pair(DRIFT)[0], pairs.calibration(DRIFT)
    return skydraft.generate(prompt, edge=edge, cloud=cloud, plan=plan, params=params, calibration=found)  # type: ignore[arg-type]


def alone(params: DecodingParams = PARAMS) -> tuple[int, ...]:
    """What the draft model writes by itself."""
    return skydraft.generate(PROMPT, edge=pairs.pair(DRIFT)[0], plan=make_plan("edge"), params=params).run().token_ids


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_over_a_link_it_writes_what_it_writes_in_one_process(
    server: Serving, connect: Connect, temperature: float
) -> None:
    """With a hand-back by number. By agree:4, which auto has, tokens that cross the stop are kept, and so the link has
    a say in the text."""
    params = DecodingParams(max_new_tokens=60, temperature=temperature, seed=3)
    cloud = connect(server.address, require=True)
    escalated = 0
    for prompt in pairs.prompts(1)[:6]:
        far, near = (start(target, prompt, params, REPRODUCIBLE).run() for target in (cloud, pairs.pair(DRIFT)[1]))
        assert (far.token_ids, far.origins) == (near.token_ids, near.origins)
        escalated += far.stats.num_escalated
    assert escalated > 0


def test_an_auto_run_whose_cloud_cannot_be_reached_goes_on_alone(connect: Connect) -> None:
    lines: list[str] = []
    generation = start(connect(NOWHERE, timeout_s=0.3, notify=lines.append)).run()
    assert generation.token_ids == alone()
    assert set(generation.origins) == {"skipped", "edge-fallback"}
    assert len(lines) == 1 and "going on alone" in lines[0]


def test_an_auto_run_does_not_wait_for_a_cloud_that_is_gone(connect: Connect) -> None:
    cloud = connect(NOWHERE, timeout_s=PATIENCE_S)
    began = time.monotonic()
    next(start(cloud).rounds())
    assert time.monotonic() - began < PATIENCE_S / 3


def test_an_auto_run_that_requires_its_cloud_says_what_is_missing(connect: Connect) -> None:
    with pytest.raises(CloudError, match="no connection"):
        start(connect(NOWHERE, timeout_s=0.3, require=True)).run()


def test_a_cloud_that_dies_on_the_way_is_replaced_by_the_draft_model(connect: Connect, unhurried: None) -> None:
    with serving(open_toy("toy")) as mortal:
        # With agree:M the rest of the text may be on its way before the server dies.
        generation = start(connect(mortal.address), plan=REPRODUCIBLE)
        rounds = generation.rounds()
        while not generation.stats.num_escalated:
            next(rounds)
        mortal.stop()
        for _ in rounds:
            pass
    assert len(generation.token_ids) == 60
    assert "edge-fallback" in generation.origins


def test_a_calibration_of_another_pair_is_refused_with_both_names(connect: Connect) -> None:
    says = r"made for toy:drift=0.2 and toy; .* toy:drift=0.2 and toy:drift=0.3"
    with serving(open_toy("toy:drift=0.3")) as other, pytest.raises(OptionError, match=says):
        start(connect(other.address, require=True))


def test_without_a_calibration_of_the_pair_nothing_is_started(
    server: Serving, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path))
    edge, cloud = pairs.pair(DRIFT)[0], connect(server.address, require=True)
    with pytest.raises(OptionError, match=r"no calibration for toy:drift=0.2 and toy\..*skydraft calibrate"):
        skydraft.generate(PROMPT, edge=edge, cloud=cloud, plan=AUTO, params=PARAMS)
    folder = tmp_path / "calibrations"
    folder.mkdir()
    (folder / "pair.json").write_text(pairs.calibration(DRIFT).model_dump_json(by_alias=True))
    found = skydraft.generate(PROMPT, edge=edge, cloud=cloud, plan=REPRODUCIBLE, params=PARAMS).run()
    assert found.token_ids == start(cloud, plan=REPRODUCIBLE).run().token_ids
