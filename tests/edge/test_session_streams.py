"""A session's stream meets what streams meet: cuts at every place, silence, another server. No token is the worse."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.edge.link import Link, LinkOptions
from skydraft.engines.toy import open_toy
from skydraft.errors import CloudLost, CloudTimeout
from skydraft.evaluation.emulated_link import EmulatedLink
from skydraft.protocol import codec
from skydraft.protocol.values import Opening, SessionCall
from skydraft.types import Prompt

from ..serving import PATIENCE_S, Relay, Serving, serving

PARAMS = DecodingParams(max_new_tokens=60, min_new_tokens=60, temperature=0.8, seed=5)
LOSSLESS = make_plan("lossless", k=4)
GATED = make_plan(gate="entropy:0.3", k=4)
Fate = Callable[["Proxy", str, bytes], bytes]


class Cut(Exception):
    """The connection is to be cut here."""


class Proxy:
    """A TCP proxy that does to one chunk what it is told, and cuts connections on which nothing came for `idle_s`."""

    def __init__(self, port: int, idle_s: float | None = None) -> None:
        self._port, self._idle_s = port, idle_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._fate: Fate | None = None
        self._open: set[socket.socket] = set()
        self._met = threading.Event()
        self.num_connections = self.num_idle = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def next_meets(self, fate: Fate) -> None:
        """What becomes of the next request, and of what follows it."""
        self._fate = fate
        self._met.clear()

    def meet(self) -> None:
        """It was done; what comes next passes."""
        self._fate = None
        self._met.set()

    @property
    def was_met(self) -> bool:
        return self._met.is_set()

    def _accept(self) -> None:
        while True:
            try:
                edge, _ = self._listener.accept()
            except OSError:
                return
            cloud = socket.create_connection(("127.0.0.1", self._port))
            self.num_connections += 1
            self._open |= {edge, cloud}
            for side in (edge, cloud):
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                side.settimeout(self._idle_s)
            for given in ((edge, cloud, "up"), (cloud, edge, "down")):
                threading.Thread(target=self._pump, args=given, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(self._fate(self, way, data) if self._fate else data)
        except TimeoutError:
            self.num_idle += 1
        except (OSError, Cut):
            pass
        for side in (source, sink):
            shut(side)
        self._open.discard(source)
        source.close()  # the other one is closed by whoever reads from it

    def close(self) -> None:
        self._listener.close()
        for side in list(self._open):
            shut(side)


def shut(side: socket.socket) -> None:
    try:
        side.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def request_lost(proxy: Proxy, way: str, data: bytes) -> bytes:
    proxy.meet()
    raise Cut


def answer_lost(proxy: Proxy, way: str, data: bytes) -> bytes:
    if way == "up":
        return data
    proxy.meet()
    raise Cut  # the server has judged


class CutAfterRequest:
    """The request passes whole, and the connection is cut before anything comes back."""

    def __call__(self, proxy: Proxy, way: str, data: bytes) -> bytes:
        if way == "down":
            proxy.meet()
            raise Cut
        threading.Timer(0.0, self._cut, (proxy,)).start()
        return data

    def _cut(self, proxy: Proxy) -> None:
        proxy.meet()
        for side in list(proxy._open):
            shut(side)


class HalfOf:
    """Half of a message passes, the way it goes, and then the connection is cut."""

    def __init__(self, way: str) -> None:
        self._way = way
        self._is_halved = False

    def __call__(self, proxy: Proxy, way: str, data: bytes) -> bytes:
        if self._is_halved:
            proxy.meet()
            raise Cut
        if way == self._way:
            self._is_halved = True
            threading.Timer(0.05, CutAfterRequest()._cut, (proxy,)).start()
            return data[: len(data) // 2]
        return data


FATES: dict[str, Callable[[], Fate]] = {
    "the request is lost": lambda: request_lost,
    "cut between request and answer": CutAfterRequest,
    "the answer is lost": lambda: answer_lost,
    "half a request": lambda: HalfOf("up"),
    "half an answer": lambda: HalfOf("down"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(open_toy("toy"), session_ttl_s=600.0) as running:
        yield running


def begin(cloud: Any, plan: Any = LOSSLESS) -> Generation:
    return skydraft.generate("语速", edge=open_toy("toy:drift=0.2"), cloud=cloud, plan=plan, params=PARAMS)


@pytest.fixture(scope="module")
def expected() -> dict[Any, tuple[int, ...]]:
    """What one process writes, by plan."""
    return {plan: begin(open_toy("toy"), plan).run().token_ids for plan in (LOSSLESS, GATED)}


@pytest.mark.parametrize("plan", [LOSSLESS, GATED], ids=["lossless", "gated"])
@pytest.mark.parametrize("fate", FATES)
def test_a_fault_at_any_place_of_a_stream_costs_no_token(
    server: Serving, expected: dict[Any, tuple[int, ...]], fate: str, plan: Any
) -> None:
    proxy = Proxy(server.port)
    cloud = skydraft.connect(proxy.address, require=True)
    generation, num_met = begin(cloud, plan), 0
    for number, _ in enumerate(generation.rounds()):
        num_met += proxy.was_met
        if number % 4 == 2:
            proxy.next_meets(FATES[fate]())
    assert generation.token_ids == expected[plan]
    assert num_met and proxy.num_connections > 2
    generation.close()
    cloud.close()
    proxy.close()


@pytest.mark.parametrize("plan", [LOSSLESS, GATED], ids=["lossless", "gated"])
def test_an_idle_stream_that_a_proxy_cuts_is_opened_again_without_a_word(
    server: Serving, expected: dict[Any, tuple[int, ...]], plan: Any, unhurried: None
) -> None:
    idle_s, lines = 0.3, list[str]()
    proxy = Proxy(server.port, idle_s)
    cloud = skydraft.connect(proxy.address, notify=lines.append)
    generation = begin(cloud, plan)
    for number, _ in enumerate(generation.rounds()):
        if number in (2, 5, 8):
            before = proxy.num_idle
            Serving.wait_until(lambda before=before: proxy.num_idle > before)  # type: ignore[misc]
            time.sleep(0.05)
    assert generation.token_ids == expected[plan] and lines == []
    assert proxy.num_connections >= 3
    generation.close()
    cloud.close()
    proxy.close()


def test_a_server_that_says_goaway_is_followed_by_another(expected: dict[Any, tuple[int, ...]]) -> None:
    with (
        serving(open_toy("toy")) as first,
        serving(open_toy("toy")) as second,
        EmulatedLink(("127.0.0.1", first.port)) as link,
    ):
        cloud = skydraft.connect(link.address)
        generation = begin(cloud)
        for number, _ in enumerate(generation.rounds()):
            if number == 4:
                link.retarget(("127.0.0.1", second.port))
                first.stop(PATIENCE_S)  # GOAWAY, and the idle stream ends
        assert generation.token_ids == expected[LOSSLESS]
        assert link.num_connections == 2
        cloud.close()


@pytest.mark.parametrize("ahead", [True, False])
def test_a_server_without_streams_is_asked_for_one_once(
    server: Serving, expected: dict[Any, tuple[int, ...]], ahead: bool
) -> None:
    with Relay(server.address) as relay:
        relay.has_sessions = False
        cloud = skydraft.connect(relay.address, open_ahead=ahead, require=True)
        for plan in (GATED, LOSSLESS, GATED):
            with begin(cloud, plan) as generation:
                assert generation.run().token_ids == expected[plan]
        assert relay.num_refused == 1 and not cloud.link.has_sessions
        assert {name for name, _ in relay.requests} >= {"Verify", "Open"}
        cloud.close()


def test_one_generation_is_one_stream(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, sound = [], Link.session
    monkeypatch.setattr(Link, "session", lambda self: opened.append(1) or sound(self))
    monkeypatch.setattr(Link, "start", lambda *_: pytest.fail("a call beside the stream"))
    cloud = skydraft.connect(server.address)
    for number in range(1, 4):
        with begin(cloud) as generation:
            generation.run()
        assert len(opened) == number
    cloud.close()
    server.wait_until(lambda: server.num_sessions == 0)
    Serving.wait_until(lambda: not any(thread.name == "watch" for thread in threading.enumerate()))


class Slow:
    """An engine whose forwards wait until they may go on."""

    def __init__(self) -> None:
        self.engine = open_toy("toy")
        self.may_go_on = threading.Event()
        sound = self.engine.forward

        def forward(feeds: Any, *, want_logits: bool) -> Any:
            self.may_go_on.wait(PATIENCE_S)
            return sound(feeds, want_logits=want_logits)

        self.engine.forward = forward  # type: ignore[method-assign]


def open_call(number: int = 1) -> bytes:
    opening = Opening(codec.short_fingerprint(open_toy("toy").vocab.fingerprint), Prompt((1, 2, 3)))
    return codec.encode_streamed_open(SessionCall(number, 0, opening))


def test_a_slow_answer_is_waited_for_while_the_server_shows_that_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    pings, sound = [], Link.ping

    def ping(self: Link, timeout_s: float = PATIENCE_S) -> float:
        pings.append(sound(self, timeout_s))
        if len(pings) == 2:
            slow.may_go_on.set()
        return pings[-1]

    monkeypatch.setattr(Link, "ping", ping)
    with serving(slow.engine) as server:
        link = Link(LinkOptions(server.address))
        stream = link.session()
        stream.send(open_call())
        reply = stream.receive(PATIENCE_S, PATIENCE_S, 0.05)
        assert codec.decode_streamed_opened(reply or b"").base == 0
        assert len(pings) >= 2 and not stream.is_over
        assert stream.close()
        link.close()


@pytest.mark.parametrize("is_there", [True, False])
def test_an_answer_that_never_comes_breaks_the_stream_in_time(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(self: Link, timeout_s: float) -> float:
        raise CloudLost("no sign of life.")

    slow = Slow()
    if not is_there:
        monkeypatch.setattr(Link, "ping", nobody)
    with serving(slow.engine) as server:
        link = Link(LinkOptions(server.address))
        stream = link.session()
        stream.send(open_call())
        began = time.monotonic()
        with pytest.raises(CloudTimeout if is_there else CloudLost, match="in time" if is_there else "sign of life"):
            stream.receive(0.5 if is_there else PATIENCE_S, PATIENCE_S, 0.1)
        assert time.monotonic() - began < PATIENCE_S / 3
        assert stream.is_over and not stream.close()
        slow.may_go_on.set()
        link.close()


def test_a_stream_that_owes_an_answer_is_not_asked_again(server: Serving) -> None:
    """Whoever stopped waiting, at Ctrl-C, would take the old answer for that to the next request."""
    link = Link(LinkOptions(server.address))
    stream = link.session()
    assert not stream.is_over
    stream.send(open_call(50))
    assert stream.is_over and not stream.close()
    link.close()


def test_a_text_that_is_left_ends_its_session_in_its_stream(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Link, "start", lambda *_: pytest.fail("a call beside the stream"))
    cloud = skydraft.connect(server.address)
    generation = begin(cloud)
    next(generation.rounds())
    server.wait_until(lambda: server.num_sessions == 1)
    generation.close()
    server.wait_until(lambda: server.num_sessions == 0)
    cloud.close()


def test_a_connection_that_was_closed_is_a_cloud_that_is_gone(server: Serving, unhurried: None) -> None:
    lines: list[str] = []
    cloud = skydraft.connect(server.address, open_ahead=True, timeout_s=0.5, notify=lines.append)
    cloud.close()
    assert begin(cloud, GATED).run().finish_reason == "length"  # alone
    assert len(lines) == 1 and "gone" in lines[0]
    with pytest.raises(CloudTimeout, match="closed"):
        begin(cloud, LOSSLESS).run()
