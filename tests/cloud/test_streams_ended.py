"""Which streams a server ends by itself: to make room, when a budget or a token is gone, and when it stops."""

import threading
import time
from pathlib import Path

import grpc
import pytest

from skydraft.engines.toy import open_toy
from skydraft.errors import CloudLost, NotAuthorized, RateLimited

from ..serving import PATIENCE_S, RawSession, serving
from .driver import (
    ANN,
    BOB,
    TOKENS,
    assert_serves,
    holding,
    long_text,
    slow_toy,
    tokens_written,
    verdict_of,
    verify_message,
)


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
