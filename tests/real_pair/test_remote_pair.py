"""The real target behind a server: same tokens over a link, in company, and after its sessions were lost."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest

import skydraft
from bench.workload import prompts
from skydraft import DecodingParams, Engine, make_plan
from skydraft.decoding.context import Context
from skydraft.decoding.request import GenerateRequest
from skydraft.edge.cloud import Cloud
from skydraft.models import default_pair
from skydraft.types import Prompt, Round

from ..serving import Serving, free_port, serving
from .conftest import TARGET_SEATS, generate, load

DEV = prompts()
PARAMS = DecodingParams(max_new_tokens=14)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    """The target, with fewer seats than clients."""
    with (
        load(default_pair().target) as engine,
        serving(engine, max_sessions=TARGET_SEATS, metrics_port=free_port()) as running,
    ):
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


def test_verdicts_in_company_on_fewer_seats_than_clients_are_those_of_a_target_alone(
    edge: Engine, cloud: Engine, server: Serving, connected: Cloud
) -> None:
    def replay(prompt: Prompt, request: GenerateRequest, rounds: list[Round]) -> list[tuple[int, ...]]:
        context, committed = Context(prompt), []
        with closing(connected.verifier(context, prompt, edge.vocab, request)) as verifier:
            for done in rounds:
                verdict = verifier.verify(done.block, context.catch_up)
                committed.append(context.commit_verdict(done.block, verdict))
        return committed

    recorded = []
    for index in (1, 20, 40):
        with skydraft.generate(DEV[index], edge=edge, cloud=cloud, plan=make_plan(k=5), params=PARAMS) as generation:
            rounds = [done for done, _ in generation.rounds()]
        recorded.append((generation.prompts.target, generation.request, rounds))
    num_evicted = server.metric("sessions_evicted")
    with ThreadPoolExecutor(len(recorded)) as pool:
        replays = [pool.submit(replay, *each) for each in recorded]
        for (_, _, rounds), future in zip(recorded, replays, strict=True):
            assert future.result(300) == [done.token_ids for done in rounds]
    server.wait_until(lambda: server.metric("sessions_evicted") > num_evicted)


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
