"""Conversations: a later turn with KV reused is the same messages sent to fresh engines, token for token."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.engines.toy import character_vocab, random_toy
from skydraft.errors import PromptError
from skydraft.prompts.messages import conversation
from tests.partial import Partial
from tests.serving import serving

VOCAB = character_vocab("我你他说在高兴人大的一，。")


def engine(drift: float = 0.0, max_sequences: int = 2) -> Any:
    made: Any = random_toy(VOCAB, drift=drift)
    made.__class__, made.max_sequences = Partial, max_sequences
    return made


def ask(
    messages: list[dict[str, str]], edge: Any, cloud: Any, mode: str, seed: int, scope: str, temperature: float
) -> Generation:
    params = DecodingParams(max_new_tokens=9, temperature=temperature, seed=seed)
    plan = make_plan(mode, k=5) if mode != "gated" else make_plan(gate="entropy:1.2", k=3)
    sides = {"edge": edge, "cloud": cloud}
    return skydraft.generate(messages=messages, **sides, plan=plan, params=params, cache_scope=scope).run()


def turn(rng: random.Random) -> dict[str, str]:
    return {"role": "user", "content": "".join(rng.choices("我你他说在高兴人大的一，。", k=rng.randint(1, 9)))}


@pytest.fixture(scope="module")
def clouds() -> Iterator[list[Any]]:
    """Two servers of the same target with few seats."""
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(engine(), max_sessions=2)) for _ in range(2)]
        yield [stack.enter_context(closing(skydraft.connect(server.address))) for server in servers]


@pytest.mark.parametrize("mode", ["lossless", "cloud", "gated", "edge"])
@pytest.mark.parametrize("where", ["here", "served"])
def test_a_conversation_is_its_messages_sent_to_fresh_engines(mode: str, where: str, clouds: list[Any]) -> None:
    """Over 120 conversations in all, several at a time, so that they take each other's places, and change servers."""
    rng = random.Random(f"{mode}{where}")
    num_cached = 0
    edge, here = engine(0.3), engine()
    for _ in range(4):
        talks: list[list[dict[str, str]]] = [[] for _ in range(4)]
        for _ in range(12):
            number = rng.randrange(len(talks))
            talk, seed = talks[number], rng.randrange(99)
            talk.append(turn(rng))
            cloud = here if where == "here" else rng.choice([clouds[0], *clouds])
            temperature = rng.choice([0.0, 0.9])
            got = ask(talk, edge, cloud, mode, seed, f"{number % 3}", temperature)
            fresh = ask(talk, engine(0.3), engine(), mode, seed, "", temperature)
            assert got.token_ids == fresh.token_ids and got.origins == fresh.origins
            num_cached += got.stats.cached_tokens.edge + got.stats.cached_tokens.cloud
            talk.append({"role": "assistant", "content": got.text})
    assert num_cached > 100


def test_one_owners_prompt_is_never_taken_up_by_another(tmp_path: Any) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("ann a-token-of-24-characters\nbob another-token-of-24-chars\n")
    talk = [turn(random.Random(5)) for _ in range(5)]
    with serving(engine(max_sequences=4), max_sessions=4, token_file=tokens) as server:

        def cached(token: str, scope: str) -> int:
            with closing(skydraft.connect(server.address, token=token)) as cloud:
                return ask(talk, engine(0.3), cloud, "lossless", 0, scope, 0.0).stats.cached_tokens.cloud

        ann, bob = "a-token-of-24-characters", "another-token-of-24-chars"
        assert cached(ann, "chat") == 0 and cached(ann, "chat") > 0
        assert cached(bob, "chat") == 0  # another owner
        assert cached(ann, "other") == 0  # another scope
        assert cached(bob, "chat") > 0


@pytest.mark.parametrize("wrong", [
    *({"role": "user", "content": "我"}, "我", ["我"]),
    *([each] for each in ({"content": "我"}, {"role": "user"}, {"role": "user", "content": 3})),
    *([{"role": role, "content": "我", **more}] for role, more in (("user", {"colour": "red"}), ("narrator", {}))),
    *([{"role": "assistant", "tool_calls": calls}] for calls in ("f", 5, [1], [{}], [{"function": "f"}])),
])  # fmt: skip
def test_what_is_no_conversation_is_refused(wrong: Any) -> None:
    with pytest.raises(PromptError):
        conversation(wrong)
