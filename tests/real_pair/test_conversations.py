"""Conversations on the real pair: KV is reused, and the text is that of a prompt read anew."""

import skydraft
from bench.workload import prompts
from skydraft import DecodingParams, Engine, Generation, make_plan

from .conftest import DRAFT_SEATS, TARGET_SEATS

DEV = prompts()
Messages = list[dict[str, str]]


def answer(talk: Messages, seats: dict[str, Engine], scope: str, num_tokens: int = 6) -> Generation:
    params = DecodingParams(max_new_tokens=num_tokens, temperature=0.7, seed=len(talk))
    plan = make_plan("lossless", k=4)  # in which both models read each prompt
    with skydraft.generate(messages=talk, plan=plan, params=params, cache_scope=scope, **seats) as generation:
        return generation.run()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_later_turn_is_the_same_messages_read_anew(edge: Engine, cloud: Engine) -> None:
    seats, kept = {"edge": edge, "cloud": cloud}, []
    for engine in seats.values():  # which know nothing of other tests
        engine.forget_kept()
    talk: Messages = [user(DEV[0] * 7)]  # longer than a part of a prompt
    for turn in range(3):
        if turn == 1:  # another conversation and one that is not kept: of two seats of the target none is left
            answer([user(DEV[1])], seats, "talks", 1)
            answer([user(DEV[2])], seats, "", 1)
        reused, fresh = (answer(talk, seats, scope) for scope in ("talks", ""))
        assert reused.token_ids == fresh.token_ids and reused.origins == fresh.origins
        cached = reused.stats.cached_tokens
        kept.append((cached.edge >= edge.max_batch_rows, cached.cloud >= edge.max_batch_rows))
        talk += [{"role": "assistant", "content": reused.text}, user(DEV[turn + 10])]
    assert (DRAFT_SEATS, TARGET_SEATS) == (3, 2)
    assert kept == [(False, False), (True, False), (True, True)]
