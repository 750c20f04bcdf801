"""Which streams a server ends by itself: to make room, when a budget or a token is gone, and when it stops."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from skydraft.cloud.access import Keyring
from skydraft.cloud.limits import Limits
from skydraft.cloud.streams import Streams
from skydraft.edge.link import Link, LinkOptions
from skydraft.engines.toy import open_toy
from skydraft.errors import CloudBusy, CloudLost, NotAuthorized, RateLimited
from skydraft.protocol import codec

from ..serving import PATIENCE_S, serving
from .raw_streams import TOKENS, Stream, assert_serves, verify_call


def test_silence_and_garbage_take_nobody_elses_place(tmp_path: Path) -> None:
    """One token opens streams without end, says nothing or nonsense; another is served, and health stays."""
    token_file = tmp_path / "tokens"
    token_file.write_text(TOKENS)
    with (
        serving(open_toy("toy"), token_file=token_file, max_queue=8) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        mine = Link(LinkOptions(server.address, token="another-token-of-24-chars"))
        own = mine.session()
        own.send(verify_call(99))
        assert own.receive(PATIENCE_S, PATIENCE_S)
        silent = []
        for number in range(100):
            silent.append(Stream(channel, "a-token-of-24-characters"))
            if number % 10 == 9:
                silent[-1].send(b"\xff" * 40)
                assert mine.ping(PATIENCE_S) < 1e3 * PATIENCE_S
        server.wait_until(lambda: sum(stream.call.is_active() for stream in silent) <= 32)
        assert not own.is_over  # those of whoever has more made way
        assert_serves(server.address, token="another-token-of-24-chars")
        for stream in silent:
            stream.end()
        own.close()
        mine.close()


class Task:
    """Stands in for what serves a stream."""

    was_cancelled = False

    def cancel(self) -> None:
        self.was_cancelled = True


@pytest.mark.parametrize(
    ("open_", "newcomer", "ended"),
    [
        ("aaabbcd", "d", "a0"),  # of whoever has the most, the one used least recently
        ("aaabbcd", "a", "a0"),
        ("Aaabbcd", "d", "a1"),  # not one that is being answered
        ("AAAbbcd", "d", "b3"),
        ("AAAbbcd", "b", "b3"),
        ("AAAbcde", "b", "b3"),  # its own, since the others have no more
        ("AAAbcde", "f", "b3"),
        ("AAABCDE", "f", None),
        ("AAABBcd", "b", None),  # those of who has fewer are not taken
    ],
)
def test_whose_stream_makes_way(open_: str, newcomer: str, ended: str | None, tmp_path: Path) -> None:
    token_file = tmp_path / "tokens"
    token_file.write_text("".join(f"{name} {name * 20}\n" for name in "abcdef"))

    async def crowd() -> list[str]:
        times = iter(range(100))
        streams = Streams(Keyring(token_file), Limits(max_queue=2), lambda: float(next(times)))
        streams._most = len(open_)
        tasks: list[Any] = [Task() for _ in open_]
        with ExitStack() as stack:
            for name, task in zip(open_, tasks, strict=True):
                entered = stack.enter_context(streams.entered(f"Bearer {name.lower() * 20}", task))
                entered.is_busy = name.isupper()
            with suppress(CloudBusy):
                stack.enter_context(streams.entered(f"Bearer {newcomer * 20}", Task()))  # type: ignore[arg-type]
            gone = [f"{open_[number].lower()}{number}" for number, task in enumerate(tasks) if task.was_cancelled]
            streams.drain()
        return gone

    assert asyncio.run(crowd()) == ([ended] if ended else [])


def test_an_empty_budget_ends_a_stream_and_says_for_how_long() -> None:
    with serving(open_toy("toy"), rows_per_s=20.0) as server, grpc.insecure_channel(server.address) as channel:
        with pytest.raises(RateLimited) as raised:
            for number in range(1, 9):
                Stream(channel).ask(verify_call(number, draft_ids=(5,) * 20))
        assert 0 < raised.value.retry_after_s < 10


@pytest.mark.parametrize("idle", [True, False])
def test_a_token_that_is_revoked_ends_its_streams(tmp_path: Path, idle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not idle:
        monkeypatch.setattr("skydraft.cloud.streams._SWEEP_S", 3600.0)  # it is noticed when something is asked
    token_file = tmp_path / "tokens"
    token_file.write_text(TOKENS)
    with serving(open_toy("toy"), token_file=token_file) as server, grpc.insecure_channel(server.address) as channel:
        phone, robot = Stream(channel, "a-token-of-24-characters"), Stream(channel, "another-token-of-24-chars")
        for number, stream in enumerate((phone, robot), 1):
            stream.ask(verify_call(number))
        token_file.write_text(TOKENS.splitlines()[1] + "\n")
        if idle:
            server.wait_until(lambda: not phone.call.is_active())
        else:
            time.sleep(1.1)
        with pytest.raises(NotAuthorized, match="does not know"):
            phone.ask(verify_call(1))
        assert codec.decode_verdict(robot.ask(verify_call(2)), 0).base == 0
        with pytest.raises(NotAuthorized):
            Stream(channel).ask(verify_call(3))


def test_a_server_that_stops_ends_idle_streams_at_once_and_answers_the_others_first() -> None:
    engine = open_toy("toy")
    with serving(engine) as server, grpc.insecure_channel(server.address) as channel:
        sound, gate = engine.forward, threading.Event()
        idle, busy = Stream(channel), Stream(channel)
        idle.ask(verify_call(1))

        def slow(feeds: Any, *, want_logits: bool) -> Any:
            gate.wait(PATIENCE_S)
            return sound(feeds, want_logits=want_logits)

        engine.forward = slow  # type: ignore[method-assign]
        busy.send(verify_call(2))
        time.sleep(0.2)
        began = time.monotonic()
        stopping = threading.Thread(target=server.stop, args=(PATIENCE_S,))
        stopping.start()
        with pytest.raises(CloudLost, match="shutting down"):
            idle.answer()
        gate.set()
        assert codec.decode_verdict(busy.answer(), 0).base == 0
        with pytest.raises(CloudLost, match="shutting down"):
            busy.answer()
        stopping.join()
        assert time.monotonic() - began < PATIENCE_S / 2
