"""A server that is made of lies: nothing of it is committed, and the edge ends with an error of its own, soon and
small. What servers behind either wire do is in `tests/hostile`."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import repeat
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.engines.base import Engine
from skydraft.errors import CloudError
from skydraft.protocol import codec
from skydraft.protocol.values import VerifyCall
from skydraft.types import Verdict

from .. import toys
from ..hostile.texts import committed
from ..serving import Relay, asked, serving
from ..toys import PROMPT, VOCAB

Answer = Callable[[VerifyCall], Iterable[bytes]]


@contextmanager
def made_of_lies(target: Engine, answer: Answer) -> Iterator[Relay]:
    """A server of this target that gives these answers to what it is to verify, and is then gone."""
    with serving(target) as server, Relay(server.address) as relay:

        def lie(replies: Iterator[bytes], context: Any) -> Iterator[bytes]:
            call = asked([data for name, data in relay.requests if name == "verify"][-1])
            assert isinstance(call, VerifyCall)
            yield from answer(call)

        relay.faults = repeat(lie)
        yield relay


def num_asked(relay: Relay) -> int:
    return sum(name == "verify" for name, _ in relay.requests)


def verdict(call: VerifyCall, *, num_accepted: int = 0, is_last: bool = False) -> bytes:
    told = Verdict(call.base, num_accepted, 3, audit=(True,) * len(call.catch_up_ids))
    return codec.encode_verdict(told, is_last=is_last)


LIE = toys.TOOL  # a token that stands where none may come


def on(call: VerifyCall, after: int, token_id: int, *, is_last: bool = False) -> bytes:
    return codec.encode_verdict(Verdict(call.base + after, 0, token_id), is_last=is_last, is_first=False)


WRITTEN: dict[str, Callable[[VerifyCall], list[bytes]]] = {
    "after a wholly accepted block": lambda call: [
        verdict(call, num_accepted=len(call.draft_ids)), on(call, len(call.draft_ids) + 1, LIE)
    ],
    "after a last verdict": lambda call: [verdict(call, is_last=True), on(call, 1, LIE)],
    "more than it may": lambda call: [verdict(call), on(call, 1, 3), on(call, 2, 3), on(call, 3, LIE)],
    "too early": lambda call: [verdict(call), on(call, 0, LIE)],
    "too late": lambda call: [verdict(call), on(call, 2, LIE)],
    "twice the same": lambda call: [verdict(call), on(call, 1, 3), on(call, 1, LIE)],
    "no such token": lambda call: [verdict(call), on(call, 1, VOCAB.size)],
    "after its last": lambda call: [verdict(call), on(call, 1, 3, is_last=True), on(call, 2, LIE)],
}  # fmt: skip


@pytest.mark.parametrize("said", WRITTEN)
def test_what_may_not_be_written_is_committed_by_nobody(said: str) -> None:
    """The text is what the verdicts say and the tokens that may follow, or it ends with an error."""
    params = DecodingParams(max_new_tokens=50, min_new_tokens=50)
    plan, edge = make_plan("lossless", k=4, hand_back="2"), toys.toy(1)
    with (
        made_of_lies(edge, WRITTEN[said]) as relay,
        closing(skydraft.connect(relay.address, timeout_s=1.0, require=True)) as cloud,
    ):
        began = time.monotonic()
        generation = skydraft.generate(PROMPT, edge=edge, cloud=cloud, plan=plan, params=params, raw=True)
        with suppress(CloudError):
            generation.run()
    assert time.monotonic() - began < 30 and num_asked(relay) < 300
    own = [one for one, origin in zip(committed(generation), generation.origins, strict=True) if origin != "accepted"]
    assert set(own) == {3} and LIE not in committed(generation)
    written = [record.outcome == "written" for record in generation.records]
    assert not any(all(written[at : at + 3]) for at in range(len(written) - 2))  # two at most
