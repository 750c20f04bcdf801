"""What a server answers to nonsense and to everybody at once: a clean status, and service for others."""

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from skydraft import DecodingParams, errors
from skydraft.protocol import codec
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.values import SESSION, Opening, TargetId

from ..mutating import flipped
from ..serving import PATIENCE_S, RawSession, Serving, free_port, serving
from .driver import LONG, assert_serves, holding, later, open_message, opening, verdict_of, verify_message

CLEAN = "ok INVALID_ARGUMENT NOT_FOUND FAILED_PRECONDITION OUT_OF_RANGE ALREADY_EXISTS UNAVAILABLE RESOURCE_EXHAUSTED"
MANY = (1,) * 250_000  # within the limit of bytes


def with_params(**params: Any) -> Opening:
    return opening(params=DecodingParams(**params))


WRONG_OPENINGS: list[tuple[Opening, type[errors.SkydraftError], str]] = [
    (opening(*[1] * 60), errors.LimitExceeded, "up to 50 fit"),
    (opening(target=TargetId("00112233", 40)), errors.TargetChanged, "begun with"),
    (with_params(grammar="regex:("), errors.GrammarRefused, "grammar"),
    (with_params(stop=("ab",) * 65), errors.LimitExceeded, "stop strings"),
    (with_params(stop=("a" * 4097,)), errors.LimitExceeded, "characters in stop strings"),
    (with_params(logit_bias=[(number, 1.0) for number in range(1025)]), errors.LimitExceeded, "biased and stop tokens"),
    (with_params(think_start="a" * 70, think_end="b" * 70), errors.LimitExceeded, "tags of thinking"),
    (opening(*MANY), errors.LimitExceeded, "do not fit"),
    (opening(*[1] * 45, committed_ids=(1,) * 4060), errors.LimitExceeded, "up to 4095 fit"),
]
WRONG: list[tuple[bytes, type[errors.SkydraftError], str]] = [
    *((message(1, wrong), error, says) for wrong, error, says in WRONG_OPENINGS
      for message in (open_message, lambda number, wrong: verify_message(number, opening=wrong, write=3))),
    (verify_message(draft=(5, 487)), errors.ProtocolError, "no id 487"),
    (verify_message(draft=(5,) * 33), errors.LimitExceeded, "up to 32 fit"),
    (b"", errors.ProtocolError, "no session"),
    (later(), errors.ProtocolError, "no session"),
    (open_message(0), errors.ProtocolError, "no session"),
    (later(2, 3, session=7, catch_up_ids=(4, 5, 6)), errors.ProtocolError, "more than its base"),
    (b"\xff" * 40, errors.ProtocolError, "no valid"),
    (pb.SessionRequest(session=1, action=9).SerializeToString(), errors.ProtocolError, "unknown"),
    (pb.SessionRequest(session=1, action=pb.ACTION_OPEN).SerializeToString(), errors.ProtocolError, "no opening"),
    (codec.encode_close(0), errors.ProtocolError, "no session"),
    (bytes(300 * 1024), errors.LimitExceeded, "larger"),
    (later(session=1, draft=MANY), errors.LimitExceeded, "do not fit"),
    (later(session=1, base=len(MANY), catch_up_ids=MANY), errors.LimitExceeded, "do not fit"),
    (later(session=1, base=4100), errors.LimitExceeded, "up to 4095 fit"),
]  # fmt: skip


def test_a_wrong_request_ends_its_stream_and_leaves_nothing(server: Serving, new: Callable[[], RawSession]) -> None:
    for request, error, says in WRONG:
        with pytest.raises(error, match=says) as raised:
            new().ask(request)
        assert "\n" not in str(raised.value) and "/" not in str(raised.value)  # no trace, no path
    assert server.num_sessions == 0
    assert_serves(server.address)


def test_broken_messages_get_clean_answers_and_leave_nothing(server: Serving) -> None:
    rng, seen = random.Random(0), Counter[Any]()
    seeds = [
        verify_message(), open_message(9), codec.encode_close(7), verify_message(8, write=5), later(session=7),
        verify_message(opening=with_params(temperature=0.5, stop=("a",))),
    ]  # fmt: skip
    with grpc.insecure_channel(server.address) as channel:
        method: Any = channel.stream_stream(SESSION)
        for _ in range(500):
            try:
                list(method(iter([flipped(rng.choice(seeds), rng) for _ in range(4)]), timeout=PATIENCE_S))
                seen["ok"] += 1
            except grpc.RpcError as error:
                seen[error.code().name] += 1
    assert seen.keys() <= {*CLEAN.split()} and seen["INVALID_ARGUMENT"] > 150 and seen["ok"], seen
    assert_serves(server.address)
    assert server.num_sessions <= 8


def test_a_client_that_does_not_read_holds_up_nobody(server: Serving, new: Callable[[], RawSession]) -> None:
    streams = [new() for _ in range(4)]
    for number, stream in enumerate(streams, 1):
        stream.ask(verify_message(number, opening=opening(params=LONG), write=4000))
    assert_serves(server.address, timeout_s=5.0)
    for stream in streams:
        stream.end()
    again = new()
    assert verdict_of(again.ask(verify_message(1, opening=opening(params=LONG)))).base == 0
    assert_serves(server.address)


def test_requests_that_are_cancelled_keep_their_places_until_the_worker_has_seen_them() -> None:
    """Else as many as a client likes would lie in the worker's inbox while it is in a long forward."""
    engine, go, was_asked = holding()
    with (
        serving(engine, max_queue=10, max_sessions=40, metrics_port=free_port()) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        first = RawSession(channel)
        first.send(verify_message(1))
        assert was_asked.wait(PATIENCE_S)
        for number in range(2, 30):
            stream = RawSession(channel)
            stream.send(verify_message(number))
            time.sleep(0.02)
            if number > 15:
                with pytest.raises(errors.CloudBusy):
                    stream.answer()
            stream.end()
        go.set()
        assert first.answer()
        assert server.metrics("calls_total")['{method="Session",outcome="CloudBusy"}'] >= 14
        server.wait_until(lambda: server.metric("requests_waiting") == 0)  # all places are free again
        assert RawSession(channel).ask(open_message(99))
