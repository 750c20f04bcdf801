"""What a server answers to nonsense and to everybody at once: a clean status, and service for others."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

import grpc
import numpy as np
import pytest

from skydraft import DecodingParams
from skydraft.engines.toy import open_toy
from skydraft.errors import (
    BaseMismatch,
    CloudFailure,
    Diverged,
    LimitExceeded,
    ProtocolError,
    SessionNotFound,
    SkydraftError,
    UnknownModel,
    VocabularyMismatch,
)
from skydraft.protocol import codec
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.values import SERVICE, SessionCall
from skydraft.types import DraftBlock

from ..serving import PATIENCE_S, Serving, free_port, serving
from .raw_calls import assert_serves, later, link_to, opening, verify_call

CLEAN = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
}


def catches_up_too_much() -> bytes:
    """Three tokens to catch up where two were generated."""
    message = pb.VerifyRequest.FromString(verify_call(opening=opening(1, committed_ids=(2, 3))))
    message.catch_up_ids.extend([4, 5, 6])
    message.ClearField("opening")
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        pytest.param(verify_call(draft=(5, 487)), ProtocolError, id="id out of range"),
        pytest.param(verify_call(opening=opening(1, 2, 487)), ProtocolError, id="prompt id out of range"),
        pytest.param(verify_call(draft=(5,) * 33), LimitExceeded, id="block too large"),
        pytest.param(verify_call(opening=opening(*[1] * 60)), LimitExceeded, id="prompt too long"),
        pytest.param(verify_call(opening=opening(fingerprint="00" * 8)), VocabularyMismatch, id="other vocabulary"),
        pytest.param(verify_call(opening=opening(model="gpt-9")), UnknownModel, id="other model"),
        pytest.param(later(9), SessionNotFound, id="unknown session"),
        pytest.param(b"", ProtocolError, id="nothing"),
        pytest.param(verify_call(session=0), ProtocolError, id="no session"),
        pytest.param(catches_up_too_much(), ProtocolError, id="more to catch up than its base"),
        pytest.param(b"\xff" * 40, ProtocolError, id="noise"),
    ],
)
def test_a_wrong_request_gets_its_own_error_and_leaves_nothing(request_: bytes, error: type[SkydraftError]) -> None:
    with serving(open_toy("toy"), max_prompt=50) as server:
        link = link_to(server)
        with pytest.raises(error) as raised:
            link.call("Verify", request_, PATIENCE_S)
        assert "\n" not in str(raised.value) and "/" not in str(raised.value)  # no trace, no path
        assert server.num_sessions == 0
        link.close()
        assert_serves(server)


def test_the_base_right_after_the_prompt_is_0_whatever_the_prompt(server: Serving) -> None:
    link = link_to(server)
    for session, prompt in ((7, (1,)), (8, (1, 2, 3)), (9, tuple(range(40)))):
        opened = codec.decode_opened(
            link.call("Open", codec.encode_session_call(SessionCall(session, 0, opening(*prompt))), PATIENCE_S)
        )
        verdict = codec.decode_verdict(
            link.call("Verify", verify_call(session, opening=opening(*prompt)), PATIENCE_S), 0
        )
        assert (opened.base, verdict.base) == (0, 0) and verdict.num_tokens > 0
        ids = np.array([*prompt, *verdict.commits(DraftBlock(0, (5, 6)))], np.int32)
        again = later(verdict.num_tokens, session=session, digest=codec.digest(ids))
        assert codec.decode_verdict(link.call("Verify", again, PATIENCE_S), 0).base == verdict.num_tokens
    link.close()


def test_a_base_beyond_the_length_and_a_wrong_digest_change_nothing(server: Serving) -> None:
    link = link_to(server)
    first = codec.decode_verdict(link.call("Verify", verify_call(), PATIENCE_S), 0)
    for wrong, error in ((90, BaseMismatch), (first.base, BaseMismatch), (first.base + first.num_tokens, Diverged)):
        with pytest.raises(error):
            link.call("Verify", later(wrong, digest=1), PATIENCE_S)
    assert codec.decode_verdict(link.call("Verify", verify_call(), PATIENCE_S), 0) == first  # still the last one
    link.close()


def test_ten_thousand_broken_messages_get_clean_answers_while_others_are_served() -> None:
    with serving(open_toy("toy"), metrics_port=free_port()) as server:
        break_ten_thousand(server)
        assert_serves(server)
        server.wait_until(lambda: server.metric("requests_waiting") == 0)
        assert server.num_sessions <= 8


def break_ten_thousand(server: Serving) -> None:
    rng = random.Random(0)
    seeds = [
        verify_call(),
        codec.encode_session_call(SessionCall(9, 0, opening())),
        codec.encode_close(7),
        verify_call(opening=opening(params=DecodingParams(temperature=0.5, stop=("a",)))),
    ]
    channel = grpc.insecure_channel(server.address)
    methods = [channel.unary_unary(f"/{SERVICE}/{name}") for name in ("Open", "Verify", "Close", "GetInfo", "Nothing")]
    generate = channel.unary_stream(f"/{SERVICE}/Generate")
    seen: Counter[Any] = Counter()
    served: list[BaseException | None] = []

    def serve_others() -> None:
        try:
            for _ in range(20):
                assert_serves(server)
            served.append(None)
        except BaseException as error:
            served.append(error)

    others = threading.Thread(target=serve_others)
    others.start()
    for number in range(10_000):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randrange(4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        message = rng.randbytes(rng.randrange(60)) if number % 5 == 0 else bytes(data[: rng.randrange(len(data) + 1)])
        try:
            if number % 50 == 0:
                list(generate(message, timeout=PATIENCE_S))
            else:
                rng.choice(methods)(message, timeout=PATIENCE_S)
            seen["ok"] += 1
        except grpc.RpcError as error:
            seen[error.code()] += 1
            assert error.code() in CLEAN, (error.code(), error.details(), message)
    others.join()
    channel.close()
    assert served == [None]
    assert seen[grpc.StatusCode.INVALID_ARGUMENT] > 1000 and seen["ok"] > 100


def test_a_thousand_opens_without_a_close_leave_as_many_sessions_as_there_are_seats(server: Serving) -> None:
    link = link_to(server)
    for number in range(1000):
        link.call(
            "Open", codec.encode_session_call(SessionCall(number + 1, 0, opening(1, 2, number % 400))), PATIENCE_S
        )
    assert server.num_sessions == 8
    with pytest.raises(SessionNotFound):  # nothing is kept of one that had to go
        link.call("Verify", later(0, session=992), PATIENCE_S)
    with pytest.raises(Diverged):
        link.call("Verify", later(0, session=993), PATIENCE_S)
    link.close()
    assert_serves(server)


def test_a_message_beyond_the_limit_is_refused(server: Serving) -> None:
    link = link_to(server)
    with pytest.raises(LimitExceeded):
        link.call("Verify", bytes(300 * 1024), PATIENCE_S)
    link.close()
    assert_serves(server)


def test_a_client_that_does_not_read_its_stream_holds_up_nobody_and_leaves_nothing(server: Serving) -> None:
    channel = grpc.insecure_channel(server.address)
    long = opening(params=DecodingParams(max_new_tokens=4000, min_new_tokens=4000))
    streams = [
        channel.unary_stream(f"/{SERVICE}/Generate")(
            codec.encode_session_call(SessionCall(n, 0, long)), timeout=4 * PATIENCE_S
        )
        for n in range(1, 5)
    ]
    for stream in streams:
        next(stream)
    assert_serves(server, timeout_s=5.0)
    for stream in streams:
        stream.cancel()
    server.wait_until(lambda: server.num_sessions <= 1)
    channel.close()


def test_one_client_that_stops_in_the_middle_of_a_round_stalls_nobody(server: Serving) -> None:
    gone = link_to(server)
    gone.start("Verify", verify_call(session=11), PATIENCE_S)
    gone.reconnect()  # without waiting for the answer
    assert_serves(server)
    gone.close()


def test_a_server_whose_model_fails_says_so_without_telling_how(caplog: pytest.LogCaptureFixture) -> None:
    engine = open_toy("toy")
    with serving(engine) as server:
        sound, engine.forward = engine.forward, _raise  # type: ignore[method-assign]
        link = link_to(server)
        with pytest.raises(CloudFailure) as raised:
            link.call("Verify", verify_call(), PATIENCE_S)
        assert "secret" not in str(raised.value)
        engine.forward = sound  # type: ignore[method-assign]
        link.close()
        assert_serves(server)
    assert "secret" in caplog.text


def _raise(*_: Any, **__: Any) -> Any:
    raise RuntimeError("/secret/path is gone")
