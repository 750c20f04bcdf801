"""The real target behind a server: same tokens over a link, and after its sessions were lost."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

import skydraft
from bench.workload import prompts
from skydraft import DecodingParams, Engine, make_plan
from skydraft.edge.cloud import Cloud
from skydraft.models import default_pair

from ..serving import Serving, serving
from .conftest import TARGET_SEATS, generate, load

DEV = prompts()
PARAMS = DecodingParams(max_new_tokens=14)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with load(default_pair().target) as engine, serving(engine, max_sessions=TARGET_SEATS) as running:
        yield running


@pytest.fixture
def connected(server: Serving) -> Iterator[Cloud]:
    with closing(skydraft.connect(server.address, timeout_s=120)) as connection:
        yield connection


@pytest.mark.parametrize(
    ("index", "mode", "temperature"),
    [(0, "lossless", 0.0), (14, "lossless", 0.8), (30, "quality", 0.0), (5, "cloud", 0.8)],
)
def test_remote_is_local(
    edge: Engine, cloud: Engine, connected: Cloud, index: int, mode: str, temperature: float
) -> None:
    params = replace(PARAMS, temperature=temperature, seed=7)
    far = generate(DEV[index], mode, edge, connected, params)
    near = generate(DEV[index], mode, edge, cloud, params)
    assert (far.token_ids, far.origins, far.text) == (near.token_ids, near.origins, near.text)


@pytest.mark.parametrize("mode", ["lossless", "cloud"])
def test_sessions_lost_in_the_middle_cost_no_token(
    edge: Engine, cloud: Engine, server: Serving, connected: Cloud, mode: str
) -> None:
    params = replace(PARAMS, max_new_tokens=24)
    generation = skydraft.generate(DEV[3], edge=edge, cloud=connected, plan=make_plan(mode), params=params)
    for number, _ in enumerate(generation.rounds()):
        if number in (2, 5):
            server.forget_sessions()
    assert generation.token_ids == generate(DEV[3], mode, edge, cloud, params).token_ids
