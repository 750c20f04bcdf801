"""What a client names is bounded, and what it leaves behind is too."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

import grpc
import pytest

from skydraft.config import DecodingParams
from skydraft.edge.link import Link, LinkOptions
from skydraft.edge.token_stream import TokenStream
from skydraft.engines.toy import open_toy
from skydraft.errors import LimitExceeded
from skydraft.protocol import codec
from skydraft.protocol.codec import short_fingerprint
from skydraft.protocol.values import SERVICE, Opening, SessionCall
from skydraft.types import Prompt
from tests.serving import PATIENCE_S, serving

FINGERPRINT = short_fingerprint(open_toy("toy").vocab.fingerprint)


def call(number: int, **opening: Any) -> bytes:
    given: dict[str, Any] = {"prompt": Prompt((1, 2, 3))} | opening
    return codec.encode_session_call(SessionCall(number, 1, Opening(FINGERPRINT, **given)))


@pytest.mark.parametrize(
    ("opening", "says"),
    [
        ({"params": DecodingParams(stop=("ab",) * 65)}, "stop strings"),
        ({"params": DecodingParams(stop=("a" * 4097,))}, "characters in stop strings"),
        ({"params": DecodingParams(logit_bias=tuple((number, 1.0) for number in range(1025)))}, "biased tokens"),
        ({"model": "m" * 257}, "name of a model"),
        ({"cache_scope": "s" * 65}, "cache scope"),
    ],
)
def test_what_a_client_names_is_bounded(opening: dict[str, Any], says: str) -> None:
    with serving(open_toy("toy")) as server:
        link = Link(LinkOptions(server.address))
        for method in ("Open", "Generate"):
            with pytest.raises(LimitExceeded, match=says):
                if method == "Open":
                    link.call(method, call(1, **opening), PATIENCE_S)
                else:
                    for _ in TokenStream(link, call(1, **opening), PATIENCE_S).messages(5, 5):
                        pass
        link.close()


@pytest.mark.parametrize("method", ["Open", "Generate"])
def test_requests_that_are_cancelled_keep_their_places_until_the_worker_has_seen_them(method: str) -> None:
    """Else as many as a client likes would lie in the worker's inbox while it is in a long forward."""
    engine, inside, go = open_toy("toy", 4096, 40), threading.Event(), threading.Event()
    sound = engine.forward

    def forward(feeds: Any, *, want_logits: bool) -> Any:
        inside.set()
        assert go.wait(PATIENCE_S)
        return sound(feeds, want_logits=want_logits)

    engine.forward = forward  # type: ignore[method-assign]
    with serving(engine, max_queue=10, max_sessions=40) as server, grpc.insecure_channel(server.address) as channel:
        first = channel.unary_unary(f"/{SERVICE}/Open").future(call(1), timeout=PATIENCE_S)
        assert inside.wait(PATIENCE_S)
        codes = []
        for number in range(2, 60):
            if method == "Open":
                asked = channel.unary_unary(f"/{SERVICE}/Open").future(call(number), timeout=PATIENCE_S)
            else:
                asked = channel.unary_stream(f"/{SERVICE}/Generate")(call(number), timeout=PATIENCE_S)
            time.sleep(0.02)
            if asked.done() or number > 15:
                with suppress(grpc.RpcError):
                    asked.result(timeout=5) if method == "Open" else next(asked)
                codes.append(asked.code())
            else:
                asked.cancel()
        go.set()
        assert first.result(timeout=PATIENCE_S)
        assert codes and set(codes) == {grpc.StatusCode.UNAVAILABLE}
        server.wait_until(lambda: _answers(channel))


def _answers(channel: Any) -> bool:
    """Whether all places are free again."""
    with suppress(grpc.RpcError):
        channel.unary_unary(f"/{SERVICE}/Open")(call(99), timeout=5)
        return True
    return False
