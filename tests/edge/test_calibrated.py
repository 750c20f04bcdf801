"""The calibrated gate over a link: the same text as in one process, the pair checked by weights, and outages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.decoding.plan import Plan
from skydraft.edge.cloud import Cloud
from skydraft.engines.toy import open_toy
from skydraft.errors import OptionError

from ..evaluation import pairs
from ..serving import Serving, serving

DRIFT = 0.2
AUTO = make_plan("auto", gate="calibrated:0.85")
REPRODUCIBLE = make_plan("auto", gate="calibrated:0.85", hand_back="4")
PARAMS = DecodingParams(max_new_tokens=60, min_new_tokens=60)
PROMPT = pairs.prompts(1)[0]
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
