"""Floods: that of one owner leaves streams, seats and turns to the other owners, hostile orders stop nobody, and what
somebody without a token may do is nothing that lasts.
"""

import asyncio
import select
import socket
import statistics
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from skydraft.access.keys import Keyring
from skydraft.access.limits import Limits
from skydraft.cloud.sessions import ServedModel, Sessions
from skydraft.cloud.streams import Streams
from skydraft.engines.toy import open_toy
from skydraft.errors import CloudBusy, CloudFailure, CloudLost, EngineError
from skydraft.protocol.values import GET_INFO, HEALTH, SESSION, OpenCall, Opened, Opening, VerifyCall
from skydraft.types import Prompt, Verdict

from .. import toys
from ..serving import PATIENCE_S, Process, RawSession, Serving, serving
from ..toys import VOCAB
from .driver import ENDLESS, FINGERPRINT, Asked, Clock, Desk, Edge, desk_of, opened, verdict_of, verify_message


def streams_ended(owners: str, newcomer: str, tokens: Path) -> list[str]:
    """Whose streams end when another begins, where so many are open; those of capitals are being answered."""
    tokens.write_text("".join(f"{name} {name * 20}\n" for name in "abcdef"))
    made_way = list[str]()

    async def stay(streams: Streams, name: str, number: int) -> None:
        try:
            with streams.entered(f"Bearer {name.lower() * 20}") as stream:
                stream.is_busy = name.isupper()
                await asyncio.sleep(PATIENCE_S)
        except CloudLost:
            made_way.append(f"{name}{number}")

    async def crowd() -> None:
        streams = Streams(Keyring(tokens), Limits(max_queue=2), Clock())  # eight
        tasks = [asyncio.create_task(stay(streams, name, number)) for number, name in enumerate(owners)]
        await asyncio.sleep(0)
        with suppress(CloudBusy), streams.entered(f"Bearer {newcomer * 20}"):
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()

    asyncio.run(crowd())
    return made_way


def eight_seats(clock: Clock) -> tuple[Sessions, Callable[..., Any]]:
    """Sessions, and what opens one by number and owner's name."""
    sessions = Sessions(ServedModel(toys.toy(3)), Limits(max_sessions=8), clock)

    def admit(number: int, name: str, busy: Container[tuple[int, str]] = ()) -> Any:
        return sessions.admit(OpenCall(number, 1, Opening(FINGERPRINT, Prompt((1, 2)))), name.lower(), busy)

    return sessions, admit


def seats_taken(owners: str, newcomer: str, _: Path) -> list[str]:
    sessions, admit = eight_seats(Clock())
    for number, name in enumerate(owners):
        admit(number, name)
    seated = admit(99, newcomer, {(number, name.lower()) for number, name in enumerate(owners) if name.isupper()})
    gone = [f"{name}{number}" for number, name in enumerate(owners) if (number, name.lower()) not in sessions]
    assert len(sessions) == 8 and sessions.num_evicted == len(gone) == (seated is not None)
    return gone


CALLS = [HEALTH, "/grpc.health.v1.Health/Watch", GET_INFO, SESSION, "/no.such/Method"]
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever says nothing has half a second."""
    monkeypatch.setattr("skydraft.cloud.calls.QUESTION_S", 0.5)
    monkeypatch.setattr("skydraft.cloud.listening._HANDSHAKE_MS", 500)


@pytest.fixture
def guarded(token_file: Path) -> Iterator[Serving]:
    with serving(open_toy("toy"), token_file=token_file) as running:
        yield running


@contextmanager
def calls(address: str, num: int, *messages: bytes) -> Iterator[list[Any]]:
    """So many calls of every method that begin, send these messages, and do not end."""
    over = threading.Event()

    def endless() -> Iterator[bytes]:
        yield from messages
        over.wait(2 * PATIENCE_S)

    with grpc.insecure_channel(address) as channel:
        yield [channel.stream_stream(name)(endless()) for name in CALLS for _ in range(num)]
        over.set()


def health(address: str) -> bool:
    """Whether a health check on a connection of its own is answered."""
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            return bool(channel.unary_unary(HEALTH)(b"", timeout=5))
        except grpc.RpcError:
            return False


@pytest.mark.parametrize("ended_by", [streams_ended, seats_taken])
@pytest.mark.parametrize(("owners", "newcomer", "ended"), [
    ("aaabbcde", "d", "a0"),  # of whoever has the most, the one used least recently
    ("aaabbcde", "a", "a0"),
    ("Aaabbcde", "d", "a1"),  # not one that is being answered
    ("AAAbbcde", "d", "b3"),
    ("AAAbcdef", "b", "b3"),  # its own, since the others have no more
    ("AAAABbcd", "e", "b5"),
    ("AAABCDEF", "f", None),
    ("AAABBCcd", "b", None),  # those of who has fewer are not taken
])  # fmt: skip
def test_whose_place_goes_to_a_newcomer(
    ended_by: Callable[..., list[str]], owners: str, newcomer: str, ended: str | None, tmp_path: Path
) -> None:
    assert ended_by(owners, newcomer, tmp_path / "tokens") == ([ended] if ended else [])


def test_a_seat_that_was_left_goes_first_and_ends_with_its_time() -> None:
    sessions, admit = eight_seats(clock := Clock())
    for number, name in enumerate("abbccccc"):
        admit(number, name)
        clock.now += 11 * (number == 0)  # the first one is left by then
    assert admit(99, "b") and (0, "a") not in sessions
    assert admit(98, "d") and (1, "b") in sessions and (3, "c") not in sessions
    clock.now += Limits().session_ttl_s
    sessions.expire({(1, "b")})
    assert len(sessions) == 1 and (1, "b") in sessions


def victims_desk(max_sessions: int = 4) -> Desk:
    return desk_of(1, part=8, max_sessions=max_sessions, max_rows=4)


def edge_of(number: int, length: int = 1) -> Edge:
    return Edge(number, 1, ENDLESS, prompt=(3,) * length)


# What one owner asks for all at once, of each of so many sessions.
FLOODS: dict[str, tuple[int, Callable[[int], OpenCall | VerifyCall]]] = {
    "alone": (0, lambda number: edge_of(number).open()),
    "openings": (255, lambda number: edge_of(number).open()),
    "long prompts": (39, lambda number: edge_of(number, 200).open()),
    "texts": (39, lambda number: edge_of(number).stream()),
    "blocks": (39, lambda number: edge_of(number).call((), edge_of(number).likely(8), opens=True)),
    "corrections": (39, lambda number: edge_of(number).correction()),
}


def rounds(flood: str) -> list[int]:
    """Steps that each of a victim's Open and Verifies waited for."""
    desk, edge, waits = victims_desk(), Edge(900, 1, ENDLESS), []
    num_sessions, call_of = FLOODS[flood]
    flooding = [call_of(number) for number in range(1, num_sessions + 1)]

    def asked(call: OpenCall | VerifyCall) -> Asked:
        for each in flooding:
            desk.ask(each, "eve")
        desk.step(1)
        waits.append(desk.steps_until(mine := desk.ask(call, "victim")))
        return mine

    assert isinstance(asked(edge.open()).last, Opened)
    for _ in range(10):
        call = edge.call((), edge.likely(3))
        answer = asked(call).last
        assert isinstance(answer, Verdict) and answer == edge.judged(call)  # its seat is never taken
    return waits


@pytest.mark.parametrize("flood", list(FLOODS)[1:])
def test_a_flood_of_one_owner_lets_another_wait_for_three_times_as_long_as_alone_at_most(flood: str) -> None:
    assert statistics.median(rounds(flood)) <= 3 * max(statistics.median(rounds("alone")), 1)


def test_texts_of_one_owner_alone_are_never_ended_for_another_of_its_own() -> None:
    desk = victims_desk(2)
    texts = [desk.ask(edge_of(number).stream(), "eve") for number in range(1, 5)]
    desk.step(40)
    assert not any(text.is_answered for text in texts) and desk.num_sessions == 2


def test_an_owner_who_comes_back_has_not_saved_up_its_share() -> None:
    """Else it would stop everybody else until it had caught up."""
    desk = victims_desk()
    desk.answer(edge_of(900).open(), "late")
    text = desk.ask(edge_of(1).stream(), "busy")
    desk.step(200)
    for number in range(2, 30):
        desk.ask(edge_of(number, 30).open(), "late")
    before = len(text.answers)
    desk.step(40)
    assert len(text.answers) - before >= 15


def test_a_forward_that_fails_because_of_one_feed_fails_that_one_alone() -> None:
    desk, attacker, victims = desk_of(1), Edge(66, 1, ENDLESS), [Edge(number, 1, ENDLESS) for number in range(1, 5)]
    opened(desk, attacker, *victims)
    bad = min({*range(VOCAB.size)} - {*attacker.generated, *victims[0].likely(9)})
    desk.engine.fails = lambda feeds: EngineError("no") if any(bad in tokens for tokens in feeds) else None
    spoilt = desk.ask(attacker.call((), (bad, bad)))
    calls = [edge.call((), edge.likely(3)) for edge in victims]
    asked = [desk.ask(call) for call in calls]
    desk.finish()
    assert isinstance(spoilt.last, CloudFailure)
    assert [one.last for one in asked] == [edge.judged(call) for edge, call in zip(victims, calls, strict=True)]


@pytest.mark.parametrize("messages", [(), (b"",)], ids=["silent", "one message"])
def test_calls_that_do_not_end_do_not_delay_a_restart(guarded: Serving, messages: tuple[bytes, ...]) -> None:
    with calls(guarded.address, 3, *messages):
        assert health(guarded.address)  # they have come
        began = time.monotonic()
        guarded.stop(grace_s=25)
        assert time.monotonic() - began < 5


def test_a_question_that_does_not_come_ends(soon: None, guarded: Serving) -> None:
    with calls(guarded.address, 20) as begun:
        codes = {call.code() for call in begun}  # waits for each
    assert {code.name for code in codes} == {"DEADLINE_EXCEEDED", "UNIMPLEMENTED", "UNAUTHENTICATED"}


def test_connections_that_say_nothing_make_way(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skydraft.cloud.listening._MAX_CONNECTIONS", 20)
    with serving(open_toy("toy")) as server, ExitStack() as silent:
        for _ in range(40):
            silent.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        server.wait_until(lambda: health(server.address))


def begun_and_cancelled(number: int, path: str) -> bytes:
    """A call of HTTP/2 without a message, and its end."""
    fields = [(":path", path), (":authority", "x"), ("te", "trailers"), ("content-type", "application/grpc")]
    head = b"\x83\x86" + b"".join(
        b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode() for name, value in fields
    )
    stream = number.to_bytes(4, "big")
    return len(head).to_bytes(3, "big") + b"\x01\x04" + stream + head + b"\0\0\x04\x03\0" + stream + b"\0\0\0\x08"


def flood_of_calls(port: int, over: threading.Event, path: str) -> None:
    """Thousands of cancelled calls a second on one connection, and a new one for each that is lost."""
    while not over.is_set():
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5) as connection:
            connection.sendall(HELLO + b"\0\0\0\x04\x01\0\0\0\0")
            for number in range(1, 2**31, 400):
                connection.sendall(b"".join(begun_and_cancelled(number + each, path) for each in range(0, 400, 2)))
                if over.wait(0.01) or (select.select([connection], [], [], 0)[0] and not connection.recv(2**16)):
                    break


@pytest.mark.parametrize(("path", "num"), [(HEALTH, 1), (SESSION, 3), ("/no.such/Method", 3)])
def test_a_session_and_health_checks_are_answered_while_a_stranger_floods(path: str, num: int) -> None:
    """Over several connections too, unless the flood is of health checks."""
    server, over = Process(), threading.Event()
    flooding = [threading.Thread(target=flood_of_calls, args=(server.port, over, path)) for _ in range(num)]
    with grpc.insecure_channel(server.address) as channel:
        session, message = RawSession(channel), verify_message()

        def longest(what: Callable[[], Any]) -> float:
            began = time.monotonic()
            assert what()
            return time.monotonic() - began

        try:
            session.ask(message)
            for each in flooding:
                each.start()
            time.sleep(0.5)  # long enough for the calls to pile up
            asked = [longest(lambda: verdict_of(session.ask(message))) for _ in range(12)]
            checked = [longest(lambda: health(server.address)) for _ in range(12)]
            # Alone both take some milliseconds; without the limit of calls of one connection, checks fail or take 2 s.
            assert sorted(asked)[6] < 0.25 and sorted(checked)[6] < 1, (asked, checked)
        finally:
            over.set()
            for each in flooding:
                each.join()
            session.end()
            assert server.stop() == 0
