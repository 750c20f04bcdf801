"""A pair of toys, a text by them, and what must hold of it whatever a server did."""

from dataclasses import replace
from typing import Any

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.engines.base import Feeds
from skydraft.engines.toy import ToyEngine, open_toy
from skydraft.engines.vocab import Rows
from skydraft.errors import SkydraftError

TEXT, LENGTH = "语速", 40
PLANS = {
    "gated": make_plan(gate="entropy:0.3", k=4), "cloud": make_plan("cloud"), "checked": make_plan(gate="always", k=4),
    "hand-back": make_plan(gate="always", k=4, hand_back="agree:2"),
}  # fmt: skip
STREAMS = {"cloud": PLANS["cloud"], "lossless": make_plan("lossless")}  # which a chat can be asked for


def letters(spec: str) -> ToyEngine:
    """A toy that writes no bare bytes: its text is cut into its tokens in one way only."""
    engine = open_toy(spec)
    single = [token_id for token_id, piece in enumerate(engine.vocab.pieces) if len(piece) == 1]
    sound = engine.forward

    def forward(feeds: Feeds, *, want_logits: bool) -> list[Rows]:
        found = sound(feeds, want_logits=want_logits)
        for rows in found:
            rows[:, single[-256:]] = -1e3
        return found

    engine.forward = forward  # type: ignore[method-assign]
    return engine


TARGET, DRAFT = letters("toy"), letters("toy:drift=0.2")
_PARAMS = DecodingParams(max_new_tokens=LENGTH)
ALONE = skydraft.generate(TEXT, cloud=TARGET, plan=PLANS["cloud"], params=_PARAMS, raw=True).run().token_ids


def write(cloud: Any, plan: str, *, raw: bool = True, length: int = LENGTH) -> Generation:
    waits = plan in ("checked", "hand-back")  # the others go on alone
    execution: Any = {"execution": "throughput"} if waits and cloud.is_stock else {}
    cloud = replace(cloud, require=True) if waits else cloud
    params = DecodingParams(max_new_tokens=length)
    plans = PLANS | STREAMS
    return skydraft.generate(TEXT, edge=DRAFT, cloud=cloud, plan=plans[plan], params=params, raw=raw, **execution)


def choices(engine: ToyEngine, token_ids: tuple[int, ...]) -> list[int]:
    """What a model chooses before each of these tokens, after those that precede it."""
    text = [*engine.vocab.encode(TEXT), *token_ids]
    sequence = engine.open(text[:1])
    try:
        rows = engine.extend_batch([(sequence, text)])[0]
        return [int(row.argmax()) for row in rows[len(text) - len(token_ids) - 1 : -1]]
    finally:
        sequence.close()


def committed(generation: Generation) -> tuple[int, ...]:
    """Its tokens so far, also after an error."""
    return tuple(token_id for done in generation.rounds_so_far for token_id in done.token_ids)


def assert_all_is_accounted_for(generation: Generation) -> None:
    """Each token is what its writer chose after exactly those before it: nothing is lost, doubled or made up."""
    token_ids = committed(generation)
    own, other = choices(TARGET, token_ids), choices(DRAFT, token_ids)
    wanted = [
        mine if origin in ("skipped", "edge-fallback") else theirs
        for theirs, mine, origin in zip(own, other, generation.origins, strict=True)
    ]
    assert list(token_ids) == wanted


def failure_of(generation: Generation, plan: str) -> SkydraftError | None:
    """Run it; returns what it failed with, if it did. Either way no token is lost, doubled or made up."""
    failure = None
    try:
        assert len(generation.run().token_ids) == LENGTH
    except SkydraftError as error:
        assert_one_clear_line(failure := error)
    assert plan in ("gated", "lossless") or committed(generation) == ALONE[: len(committed(generation))]
    assert_all_is_accounted_for(generation)
    return failure


def assert_one_clear_line(error: SkydraftError) -> None:
    assert "\n" not in str(error) and 20 < len(str(error)) < 400, str(error)
    assert "<" not in str(error) or "<h" in str(error)  # no object of ours
