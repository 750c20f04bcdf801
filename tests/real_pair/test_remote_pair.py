"""The real target behind a server: the tokens are the same after its sessions were lost."""

from contextlib import closing

import pytest

import skydraft
from bench.workload import prompts
from skydraft import DecodingParams, Engine, make_plan

from ..serving import serving
from .conftest import generate


@pytest.mark.parametrize("mode", ["lossless", "cloud"])
def test_sessions_lost_in_the_middle_cost_no_token(edge: Engine, cloud: Engine, mode: str) -> None:
    prompt, params = prompts()[3], DecodingParams(max_new_tokens=24)
    expected = generate(prompt, mode, edge, cloud, params).token_ids
    with serving(cloud) as server, closing(skydraft.connect(server.address, timeout_s=120)) as far:
        generation = skydraft.generate(prompt, edge=edge, cloud=far, plan=make_plan(mode), params=params)
        for number, _ in enumerate(generation.rounds()):
            if number in (2, 5):
                server.forget_sessions()
    assert generation.token_ids == expected
