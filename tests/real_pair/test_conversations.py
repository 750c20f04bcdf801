"""Conversations on the real pair: KV is reused, and the text is that of a prompt read anew."""

import pytest

import skydraft
from bench.workload import prompts
from skydraft import DecodingParams, Engine, Generation, make_plan
from skydraft.gateway.pair import Pair

from ..gateway.running import gateway
from .conftest import DRAFT_SEATS, TARGET_SEATS

DEV = prompts()
Messages = list[dict[str, str]]


@pytest.fixture
def seats(edge: Engine, cloud: Engine) -> tuple[Engine, Engine]:
    """Both models, which know nothing of other tests."""
    edge.forget_kept()
    cloud.forget_kept()
    return edge, cloud


def answer(talk: Messages, seats: tuple[Engine, Engine], scope: str, mode: str, num_tokens: int = 10) -> Generation:
    edge, cloud = seats
    params = DecodingParams(max_new_tokens=num_tokens, temperature=0.7, seed=len(talk))
    plan = make_plan(mode)
    with skydraft.generate(
        messages=talk, edge=edge, cloud=cloud, plan=plan, params=params, cache_scope=scope
    ) as generation:
        return generation.run()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_later_turn_is_the_same_messages_read_anew(seats: tuple[Engine, Engine]) -> None:
    talk: Messages = [user(DEV[0] * 7)]  # longer than a part of a prompt
    edge, cloud = [], []  # what each has kept of the turn before
    for turn in range(3):
        if turn == 1:  # another conversation and one that is not kept: of two seats of the target none is left
            answer([user(DEV[1])], seats, "talks", "lossless", 1)
            answer([user(DEV[2])], seats, "", "lossless", 1)
        reused = answer(talk, seats, "talks", "lossless", 6)
        fresh = answer(talk, seats, "", "lossless", 6)
        assert reused.token_ids == fresh.token_ids and reused.origins == fresh.origins
        edge.append(reused.stats.cached_tokens.edge)
        cloud.append(reused.stats.cached_tokens.cloud)
        talk += [{"role": "assistant", "content": reused.text}, user(DEV[turn + 10])]
    assert (DRAFT_SEATS, TARGET_SEATS) == (3, 2)
    assert [num_cached >= seats[0].max_batch_rows for num_cached in edge] == [False, True, True]
    assert [num_cached >= seats[0].max_batch_rows for num_cached in cloud] == [False, False, True]


def test_lossless_through_the_gateway_is_that_of_generate(seats: tuple[Engine, Engine]) -> None:
    edge, cloud = seats
    params = DecodingParams(max_new_tokens=12, temperature=0.8, seed=4)
    expected = skydraft.generate(DEV[17], edge=edge, cloud=cloud, params=params).run()
    with gateway(Pair(edge, cloud), max_running=2) as running:
        options = {"temperature": 0.8, "seed": 4, "max_tokens": 12, "skydraft": {"token_ids": True}}
        reply = running.chat(DEV[17], model="skydraft-lossless", timeout_s=300, **options).json()
    assert reply["skydraft"]["token_ids"] == list(expected.token_ids)
    assert reply["choices"][0]["message"]["content"] == expected.text
