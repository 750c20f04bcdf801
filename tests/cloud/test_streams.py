"""Streams from the server's side: what a client may send there, a clean answer to nonsense and service for
others, and which streams the server ends.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from skydraft import DecodingParams, errors
from skydraft.engines.toy import open_toy
from skydraft.errors import BaseMismatch, CloudLost, NotAuthorized, ProtocolError, RateLimited
from skydraft.protocol import codec
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.values import SESSION, Opening, TargetId
from skydraft.types import Draft

from ..mutating import flipped
from ..serving import PATIENCE_S, RawSession, Serving, free_port, serving
from .driver import (
    ANN,
    BOB,
    LONG,
    TOKENS,
    assert_serves,
    holding,
    later,
    long_text,
    open_message,
    opening,
    slow_toy,
    text,
    tokens_written,
    verdict_of,
    verify_message,
)

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

New = Callable[[], RawSession]
LONG_TEXT = text(DecodingParams(max_new_tokens=150, min_new_tokens=150))
STOP = codec.encode_stop(0)


@pytest.fixture
def slow() -> Iterator[tuple[Serving, RawSession]]:
    """A server that writes 500 tokens a second, counts, and whom anyone may ask, and a stream to it."""
    with serving(slow_toy(), metrics_port=free_port()) as server, grpc.insecure_channel(server.address) as channel:
        yield server, RawSession(channel)


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


def test_a_stop_ends_the_writing_and_the_session_stays_for_the_next_block(slow: Any) -> None:
    _, stream = slow
    verdict = verdict_of(stream.ask(long_text()))
    stream.send(codec.encode_stop(9))  # of another verify
    first, _, _ = codec.decode_verdict(stream.answer(), is_first=False)
    stream.send(STOP)
    written = (verdict.token_id, *first.commits(), *tokens_written(stream))
    assert written == LONG_TEXT[: len(written)]
    stream.send(STOP)  # after the end, so that it means nothing
    verdict = verdict_of(stream.ask(later(*written, draft=LONG_TEXT[len(written) : len(written) + 3])))
    assert (verdict.base, verdict.num_accepted) == (len(written), 3)
    assert verdict.cost.prefill_ms == 0 and verdict.cost.num_rows == 4


@pytest.mark.parametrize("closes", [False, True])
def test_what_is_sent_while_the_target_writes_ends_that_and_waits_for_its_turn(slow: Any, closes: bool) -> None:
    server, stream = slow
    verdict = verdict_of(stream.ask(long_text()))
    stream.send(*[codec.encode_close(0)] if closes else [later(base=7, digest=1), STOP])
    written = (verdict.token_id, *tokens_written(stream))
    assert written == LONG_TEXT[: len(written)]
    if closes:
        assert not list(stream.call) and stream.call.code() is grpc.StatusCode.OK
        server.wait_until(lambda: server.num_sessions == 0)
        return
    with pytest.raises(BaseMismatch, match=f"follows 7 tokens, but the text has {len(written)}"):
        stream.answer()


@pytest.mark.parametrize("how", ["cancelled", "cut"])
def test_a_client_that_breaks_off_while_the_target_writes_ends_that_and_keeps_its_session(slow: Any, how: str) -> None:
    server, _ = slow
    channel = grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)])
    stream = RawSession(channel)
    stream.ask(long_text())
    stream.answer()
    stream.end() if how == "cancelled" else channel.close()
    server.wait_until(lambda: server.metric("requests_waiting") == 0)
    num_written = int(server.metric('generated_tokens_total{model="toy"}'))
    assert 1 < num_written < 1000 and server.num_sessions == 1
    with grpc.insecure_channel(server.address) as other:
        again = RawSession(other)
        verdict = verdict_of(again.ask(later(session=7, draft=(), write=num_written)))  # the same block
        assert verdict.token_id == LONG_TEXT[0]
        token_ids = (LONG_TEXT[0], *tokens_written(again))
        assert len(token_ids) >= num_written and token_ids == LONG_TEXT[: len(token_ids)]
    stream.end()
    channel.close()


def test_a_stream_is_about_one_session(new: New) -> None:
    stream = new()
    for _ in range(2):
        assert verdict_of(stream.ask(verify_message(7))).base == 0  # its own number may be named again
    with pytest.raises(ProtocolError, match="about session 7"):
        stream.ask(verify_message(8))
    assert verdict_of(new().ask(verify_message(8))).base == 0


@pytest.mark.parametrize("drafts", [[Draft(1, 0, (3,))] * 150, [Draft(0, 0, (3,) * 9000)]], ids=["messages", "tokens"])
def test_a_flood_of_drafts_ends_its_stream_and_no_session(new: New, drafts: list[Draft]) -> None:
    stream = new()
    verdict = verdict_of(stream.ask(verify_message(7)))
    stream.send(*map(codec.encode_draft, drafts))
    with pytest.raises(RateLimited, match="more drafts than the text can use"):
        stream.answer()
    assert verdict_of(new().ask(verify_message(7))) == verdict


def test_a_stream_that_says_nothing_ends_with_its_session() -> None:
    with serving(open_toy("toy"), session_ttl_s=0.5) as server, grpc.insecure_channel(server.address) as channel:
        silent, spoke = RawSession(channel), RawSession(channel)
        spoke.ask(verify_message())
        for stream in (silent, spoke):
            with pytest.raises(CloudLost, match="idle"):
                stream.answer()
        server.wait_until(lambda: server.num_sessions == 0)


def test_an_empty_budget_ends_a_stream_and_says_for_how_long_and_only_slows_what_is_written() -> None:
    with serving(open_toy("toy"), rows_per_s=20.0) as server, grpc.insecure_channel(server.address) as channel:
        stream, began = RawSession(channel), time.monotonic()
        stream.ask(long_text(75))
        assert len(tokens_written(stream)) == 75
        assert time.monotonic() - began > 0.5  # 64 rows at once, then 20 a second
        with pytest.raises(RateLimited) as raised:
            for number in range(2, 20):
                RawSession(channel).ask(verify_message(number, draft=(5,) * 32))
        assert 0 < raised.value.retry_after_s < 10
        assert_serves(server.address, require=True)  # waits as told


def test_a_token_that_is_revoked_is_refused_in_its_streams(token_file: Path) -> None:
    with serving(slow_toy(), token_file=token_file) as server, grpc.insecure_channel(server.address) as channel:
        ann, bob, writes = RawSession(channel, ANN), RawSession(channel, BOB), RawSession(channel, ANN)
        for number, stream in enumerate((ann, bob), 1):
            stream.ask(verify_message(number))
        writes.ask(long_text())
        token_file.write_text(TOKENS.splitlines()[1] + "\n")
        with pytest.raises(NotAuthorized, match="does not know"):
            tokens_written(writes)
        with pytest.raises(NotAuthorized, match="does not know"):
            ann.ask(verify_message(1))
        assert verdict_of(bob.ask(verify_message(2))).base == 0


def test_a_server_that_stops_ends_idle_streams_at_once_and_answers_the_others_first() -> None:
    engine, go, was_asked = holding()
    with serving(engine) as server, grpc.insecure_channel(server.address) as channel:
        go.set()
        idle, busy = RawSession(channel), RawSession(channel)
        idle.ask(verify_message(1))
        go.clear()
        was_asked.clear()
        busy.send(verify_message(2, write=3))
        assert was_asked.wait(PATIENCE_S)
        began = time.monotonic()
        stopping = threading.Thread(target=server.stop, args=(PATIENCE_S,))
        stopping.start()
        with pytest.raises(CloudLost, match="shutting down"):
            idle.answer()
        go.set()
        assert verdict_of(busy.answer()).base == 0 and len(tokens_written(busy)) == 3
        with pytest.raises(CloudLost, match="shutting down"):
            busy.answer()
        stopping.join()
        assert time.monotonic() - began < PATIENCE_S / 2
