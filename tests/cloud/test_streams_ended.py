"""Which streams a server ends by itself: to make room, when a budget or a token is gone, and when it stops."""

import asyncio
import threading
import time
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from skydraft.access.keys import Keyring
from skydraft.access.limits import Limits
from skydraft.cloud.streams import Streams
from skydraft.engines.toy import open_toy
from skydraft.errors import CloudBusy, CloudLost, NotAuthorized, RateLimited

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


@pytest.mark.parametrize(("open_", "newcomer", "ended"), [
    ("aaabbcde", "d", "a0"),  # of whoever has the most, the one used least recently
    ("aaabbcde", "a", "a0"),
    ("Aaabbcde", "d", "a1"),  # not one that is being answered
    ("AAAbbcde", "d", "b3"),
    ("AAAbcdef", "b", "b3"),  # its own, since the others have no more
    ("AAAABbcd", "e", "b5"),
    ("AAABCDEF", "f", None),
    ("AAABBCcd", "b", None),  # those of who has fewer are not taken
])  # fmt: skip
def test_whose_stream_makes_way(open_: str, newcomer: str, ended: str | None, token_file: Path) -> None:
    token_file.write_text("".join(f"{name} {name * 20}\n" for name in "abcdef"))

    made_way = []

    async def stay(streams: Streams, name: str, number: int) -> None:
        try:
            with streams.entered(f"Bearer {name.lower() * 20}") as stream:
                stream.is_busy = name.isupper()
                await asyncio.sleep(PATIENCE_S)
        except CloudLost:
            made_way.append(f"{name}{number}")

    async def crowd() -> None:
        times = iter(range(100))
        streams = Streams(Keyring(token_file), Limits(max_queue=2), lambda: float(next(times)))  # eight
        tasks = [asyncio.create_task(stay(streams, name, number)) for number, name in enumerate(open_)]
        await asyncio.sleep(0)
        with suppress(CloudBusy), streams.entered(f"Bearer {newcomer * 20}"):
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()

    asyncio.run(crowd())
    assert made_way == ([ended] if ended else [])


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
