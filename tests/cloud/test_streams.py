"""Sessions as streams, from the server's side: what a client may send there, and how much of it."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft import DecodingParams
from skydraft.cloud.server import ServeOptions
from skydraft.edge.link import Link, LinkOptions, SessionStream
from skydraft.engines.toy import open_toy
from skydraft.errors import (
    BaseMismatch,
    CloudBusy,
    CloudLost,
    Diverged,
    GrammarRefused,
    LimitExceeded,
    ProtocolError,
    SessionNotFound,
    SkydraftError,
    TargetChanged,
    UnknownModel,
    VocabularyMismatch,
)
from skydraft.protocol import codec
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.values import SessionCall, TargetId
from skydraft.types import Prompt

from ..serving import PATIENCE_S, Serving, serving
from ..toys import law
from .raw_streams import Stream, assert_serves, later, opening, verify_call


@pytest.fixture
def server() -> Iterator[Serving]:
    with serving(open_toy("toy"), max_prompt=50) as running:
        yield running


@pytest.fixture
def new(server: Serving) -> Iterator[Callable[..., Stream]]:
    """Opens streams, all over one connection."""
    with grpc.insecure_channel(server.address) as channel:
        yield lambda **given: Stream(channel, **given)


ELSEWHERE = opening(target=TargetId("00112233", 40))
WRONG = {
    "id out of range": (verify_call(draft_ids=(5, 487)), ProtocolError),
    "block too large": (verify_call(draft_ids=(5,) * 33), LimitExceeded),
    "prompt too long": (verify_call(opening=opening(prompt=Prompt((1,) * 60))), LimitExceeded),
    "other vocabulary": (verify_call(opening=opening(fingerprint="00" * 8)), VocabularyMismatch),
    "other model": (verify_call(opening=opening(model="gpt-9")), UnknownModel),
    "another target began it": (verify_call(opening=ELSEWHERE), TargetChanged),
    "a grammar that is none": (verify_call(opening=opening(params=DecodingParams(grammar="regex:("))), GrammarRefused),
    "unknown session": (later(9, session=9), SessionNotFound),
    "nothing": (b"", ProtocolError),
    "no session": (later(9), ProtocolError),
    "noise": (b"\xff" * 40, ProtocolError),
    "an action of another version": (pb.VerifyRequest(session=1, action=9).SerializeToString(), ProtocolError),
    "an opening of nothing": (pb.VerifyRequest(session=1, action=pb.ACTION_OPEN).SerializeToString(), ProtocolError),
    "too many bytes": (bytes(300 * 1024), LimitExceeded),
}


@pytest.mark.parametrize(("request_", "error"), WRONG.values(), ids=WRONG)
def test_a_wrong_request_ends_the_stream_with_the_error_of_the_call(
    server: Serving, new: Callable[..., Stream], request_: bytes, error: type[SkydraftError]
) -> None:
    link = Link(LinkOptions(server.address))
    with pytest.raises(error) as by_call:
        link.call("Verify", request_, PATIENCE_S)
    stream = new()
    with pytest.raises(error) as by_stream:
        stream.ask(request_)
    if not request_.startswith(b"\x08\x01"):  # what only a Session does
        assert str(by_stream.value) == str(by_call.value) or "Session" in str(by_call.value)
    assert not stream.call.is_active() and server.num_sessions == 0
    link.close()


def test_what_no_longer_fits_ends_the_stream_and_not_the_session(server: Serving, new: Callable[..., Stream]) -> None:
    """The same statuses as the call has, with what they say beside."""
    first = codec.decode_verdict(new().ask(verify_call()), 0)
    for wrong, error in ((90, BaseMismatch), (first.num_tokens, Diverged)):
        with pytest.raises(error) as raised:
            new().ask(later(wrong, session=7, digest=1))
        if isinstance(raised.value, BaseMismatch):
            assert (raised.value.base, raised.value.length) == (90, first.num_tokens)
    assert codec.decode_verdict(new().ask(verify_call()), 0) == first  # another stream gets the same verdict
    assert server.num_sessions == 1


def test_an_opening_a_verdict_and_an_end_in_one_stream(server: Serving, new: Callable[..., Stream]) -> None:
    stream = new()
    reply = stream.ask(codec.encode_streamed_open(SessionCall(7, 0, opening())))
    assert codec.decode_streamed_opened(reply).base == 0 and codec.decode_target(reply, "VerifyReply") is not None
    assert server.num_sessions == 1 or server.wait_until(lambda: server.num_sessions == 1) is None
    ids = np.array((1, 2, 3), np.int32)
    verdict = codec.decode_verdict(stream.ask(later(0, digest=codec.digest(ids))), 0)
    assert verdict.base == 0 and verdict.num_tokens > 0
    stream.send(codec.CLOSES, None)
    with pytest.raises(StopIteration):
        stream.answer()
    assert stream.call.code() is grpc.StatusCode.OK
    server.wait_until(lambda: server.num_sessions == 0)


@pytest.mark.parametrize("how", ["half closed", "cancelled", "cut"])
def test_a_stream_that_ends_without_a_word_leaves_its_session(server: Serving, how: str) -> None:
    channel = grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)])
    stream = Stream(channel)
    verdict = codec.decode_verdict(stream.ask(verify_call()), 0)
    if how == "half closed":
        stream.send(None)
    elif how == "cancelled":
        stream.end()
    else:
        channel.close()
    time.sleep(0.2)
    with grpc.insecure_channel(server.address) as other:
        assert codec.decode_verdict(Stream(other).ask(verify_call()), 0) == verdict
    assert server.num_sessions == 1
    stream.send(None)
    channel.close()


def test_a_stream_is_about_one_session(new: Callable[..., Stream]) -> None:
    stream = new()
    assert codec.decode_verdict(stream.ask(verify_call(7)), 0).base == 0
    assert codec.decode_verdict(stream.ask(verify_call(7)), 0).base == 0  # its own number may be named again
    with pytest.raises(ProtocolError, match="about session 7"):
        stream.ask(verify_call(8))
    assert codec.decode_verdict(new().ask(verify_call(8)), 0).base == 0


def test_the_unary_call_takes_nothing_that_is_for_streams(server: Serving) -> None:
    link = Link(LinkOptions(server.address))
    for message in (codec.encode_streamed_open(SessionCall(7, 0, opening())), codec.CLOSES):
        with pytest.raises(ProtocolError, match="Session"):
            link.call("Verify", message, PATIENCE_S)
    link.close()


@law(75)
@given(st.binary(max_size=60), st.booleans())
def test_whatever_is_sent_ends_a_stream_cleanly(noisy: Any, data: bytes, begun: bool) -> None:
    stream = noisy()
    if begun:
        stream.ask(verify_call())
    try:
        stream.ask(data)
    except (SkydraftError, StopIteration):
        assert stream.call.code() is not grpc.StatusCode.INTERNAL
    stream.end()


@pytest.fixture(scope="module")
def noisy() -> Iterator[Callable[[], Stream]]:
    running = Serving(open_toy("toy"), ServeOptions(port=0))
    with grpc.insecure_channel(running.address) as channel:
        yield lambda: Stream(channel)
        assert_serves(running.address)
    running.stop()


def test_a_server_full_of_busy_streams_says_so(server: Serving) -> None:
    engine = open_toy("toy")
    with serving(engine, max_queue=1) as running, grpc.insecure_channel(running.address) as channel:
        sound, gate = engine.forward, threading.Event()

        def slow(feeds: Any, *, want_logits: bool) -> Any:
            gate.wait(PATIENCE_S)
            return sound(feeds, want_logits=want_logits)

        engine.forward = slow  # type: ignore[method-assign]
        busy, other = Stream(channel), Stream(channel)
        busy.send(verify_call(1))
        time.sleep(0.3)
        with pytest.raises(CloudBusy):
            other.ask(verify_call(2))
        gate.set()
        assert codec.decode_verdict(busy.answer(), 0).base == 0


def test_a_stream_that_says_nothing_ends_with_its_session(server: Serving) -> None:
    with serving(open_toy("toy"), session_ttl_s=0.5) as running, grpc.insecure_channel(running.address) as channel:
        silent, spoke = Stream(channel), Stream(channel)
        spoke.ask(verify_call())
        for stream in (silent, spoke):
            with pytest.raises(CloudLost, match="idle"):
                stream.answer()
        running.wait_until(lambda: running.num_sessions == 0)


def test_whoever_leaves_in_the_middle_may_come_back_for_the_verdict() -> None:
    engine = open_toy("toy")
    with serving(engine) as server, grpc.insecure_channel(server.address) as channel:
        sound, asked, gate = engine.forward, threading.Event(), threading.Event()

        def slow(feeds: Any, *, want_logits: bool) -> Any:
            asked.set()
            gate.wait(PATIENCE_S)
            return sound(feeds, want_logits=want_logits)

        engine.forward = slow  # type: ignore[method-assign]
        left = Stream(channel)
        left.send(verify_call())
        assert asked.wait(PATIENCE_S)
        left.end()
        back = Stream(channel)
        back.send(verify_call())
        time.sleep(0.1)
        gate.set()
        assert codec.decode_verdict(back.answer(), 0).base == 0
        assert server.server._service._pending == {}  # each place was given back


def test_clients_that_leave_at_any_moment_leave_nothing(caplog: pytest.LogCaptureFixture) -> None:
    engine, rng = open_toy("toy"), random.Random(5)
    sound = engine.forward

    def slow(feeds: Any, *, want_logits: bool) -> Any:
        time.sleep(0.002)
        return sound(feeds, want_logits=want_logits)

    engine.forward = slow  # type: ignore[method-assign]
    with serving(engine) as server:
        for number in range(1, 41):
            channel = grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)])
            stream = Stream(channel)
            stream.send(*[verify_call(number)] * 4)
            time.sleep(rng.random() * 0.02)
            if number % 2:
                stream.call.cancel()
            channel.close()
            stream.end()
        service = server.server._service
        server.wait_until(lambda: not service._pending and not service._streams._open)
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert_serves(server.address)


def test_two_hundred_streams_at_once() -> None:
    """Each a session of its own, all open together, over a few seats: nobody is refused, all verdicts are right."""
    num_streams, link_of = 200, 8
    with serving(open_toy("toy"), max_sessions=16) as server:
        links = [Link(LinkOptions(server.address)) for _ in range(num_streams // link_of)]
        streams = [links[number // link_of].session() for number in range(num_streams)]

        def judged(numbered: tuple[int, SessionStream]) -> list[bytes | None]:
            number, stream = numbered
            message = verify_call(number + 1, opening=opening(prompt=Prompt((1, 2, 3 + number))))
            replies = []
            for _ in range(2):
                stream.send(message)
                replies.append(stream.receive(PATIENCE_S, PATIENCE_S))
            return replies

        with ThreadPoolExecutor(16) as pool:
            replies = list(pool.map(judged, enumerate(streams)))
        assert not any(stream.is_over for stream in streams)
        link = links[0]
        for number in (0, 77, 199):
            again = verify_call(1000 + number, opening=opening(prompt=Prompt((1, 2, 3 + number))))
            expected = codec.decode_verdict(link.call("Verify", again, PATIENCE_S), 0)
            assert [codec.decode_verdict(reply or b"", 0) for reply in replies[number]] == [expected, expected]
        assert link.ping(PATIENCE_S) > 0
        assert all(stream.close() for stream in streams)
        for link in links:
            link.close()
        server.wait_until(lambda: server.num_sessions <= 3)
