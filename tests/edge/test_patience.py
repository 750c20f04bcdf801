"""How long a cloud is waited for, in virtual time: to the millisecond, and however busy the machine is."""

from __future__ import annotations

from typing import Any

import pytest

from skydraft.decoding.context import Context
from skydraft.edge.fleet import Fleet, Links
from skydraft.edge.link import LinkOptions
from skydraft.edge.patience import Patience
from skydraft.edge.verifier import RemoteVerifier
from skydraft.errors import CloudBusy, CloudError, CloudLost, CloudTimeout, RateLimited, SkydraftError
from skydraft.protocol import codec
from skydraft.protocol.values import Opening
from skydraft.types import DraftBlock, Prompt, Verdict

PROMPT = Prompt((1, 2, 3))
BLOCK = DraftBlock(0, (5, 6))
EDGE_S = 1.0  # a gated run goes on alone within a second


class Clock:
    """Stands in for the module `time`: what sleeps is over at once."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class VirtualLink:
    """A link to a server that answers, or does not.

    `rtt_s` is a round trip and `connect_s` what a new connection takes besides; where either is None nothing ever comes
    back. `busy_s` is how long a verdict takes on the server, `refusals` are its first answers. While it `refuses` no
    connection is made.
    """

    target = "cloud.example:7373"
    has_sessions = True

    def __init__(
        self,
        clock: Clock,
        *,
        rtt_s: float | None = 0.01,
        connect_s: float = 0.0,
        busy_s: float = 0.0,
        refuses: bool = False,
        refusals: tuple[SkydraftError, ...] = (),
    ) -> None:
        self.heard_at = 0.0
        self.num_verifies = 0
        self._clock = clock
        self._rtt_s = rtt_s
        self._connect_s = self._left_s = connect_s
        self._busy_s = busy_s
        self._refuses = refuses
        self._refusals = list(refusals)

    def call(self, method: str, request: bytes, timeout_s: float) -> bytes:
        if self._refuses:
            raise CloudLost("no connection.")
        busy_s = self._busy_s if method == "Verify" else 0.0
        took_s = float("inf") if self._rtt_s is None else self._left_s + self._rtt_s + busy_s
        waited_s = min(took_s, timeout_s)
        self._clock.now += waited_s
        self._left_s = max(self._left_s - waited_s, 0.0)  # a connection goes on being made
        if took_s > timeout_s:
            raise CloudTimeout("no answer in time.")
        self.heard_at = self._clock.now
        return self.answer(method, request)

    def answer(self, method: str, request: bytes) -> bytes:
        if method != "Verify":
            return b""
        self.num_verifies += 1
        if self._refusals:
            raise self._refusals.pop(0)
        return codec.encode_verdict(Verdict(codec.decode_verify_call(request).base, 0, 5))

    def call_watched(self, method: str, request: bytes, timeout_s: float, ping_s: float) -> bytes:
        """As the real one does it: whether anybody is there is asked every 0.3 s."""
        ends = self._clock.now + timeout_s
        while self._busy_s > 0.3:
            self._busy_s -= 0.3
            self._clock.now += 0.3
            self.ping(ping_s)
            if self._clock.now > ends:
                raise CloudTimeout("no answer in time.")
        if self._rtt_s is None or self._left_s + self._rtt_s > 0.3:
            self._clock.now += 0.3
            self._left_s = max(self._left_s - 0.3, 0.0)
            self.ping(ping_s)
        return self.call(method, request, timeout_s)

    def session(self) -> VirtualStream:
        return VirtualStream(self)

    def late(self, timeout_s: float, ping_s: float, quick_s: float) -> None:
        """Wait for an answer in a stream, as the real one does: from `quick_s` on it asks whether anybody is there."""
        if self._refuses:
            raise CloudLost("no connection.")
        began, look_s = self._clock.now, quick_s
        comes = began + (float("inf") if self._rtt_s is None else self._left_s + self._rtt_s + self._busy_s)
        while comes > self._clock.now + look_s:
            self._clock.now += look_s
            self._left_s = max(self._left_s - look_s, 0.0)
            if self._clock.now > began + timeout_s:
                raise CloudTimeout("no answer in time.")
            self.ping(ping_s)
            look_s = 0.3
        self._clock.now = max(comes, self._clock.now)
        self._left_s = 0.0
        self.heard_at = self._clock.now

    def ping(self, timeout_s: float) -> float:
        try:
            self.call("Check", b"", timeout_s)
        except CloudTimeout as error:
            raise CloudLost("no sign of life.") from error
        return 1.0

    def reconnect(self) -> None:
        self._left_s = self._connect_s

    def info(self, timeout_s: float) -> Any:
        raise CloudLost("not yet")  # the probe's question; it takes none of our time

    def take_bytes(self) -> tuple[int, int]:
        return 0, 0

    def start(self, *_: Any) -> None:
        return None


class VirtualStream:
    """A session's stream over a virtual link."""

    is_over = is_named = False

    def __init__(self, link: VirtualLink) -> None:
        self._link = link

    def send(self, request: bytes) -> None:
        self._request = request

    def receive(self, timeout_s: float, ping_s: float, quick_s: float) -> bytes:
        self._link.late(timeout_s, ping_s, quick_s)
        return self._link.answer("Verify", self._request)

    def cancel(self) -> None:
        return None

    def close(self) -> bool:
        return True


@pytest.fixture(params=["streams", "calls"])
def clock(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Clock:
    clock = Clock()
    monkeypatch.setattr(VirtualLink, "has_sessions", request.param == "streams")
    monkeypatch.setattr("skydraft.edge.verifier.time", clock)
    return clock


def asked(clock: Clock, patience: Patience, **link: Any) -> tuple[RemoteVerifier, VirtualLink]:
    virtual: Any = VirtualLink(clock, **link)
    links = Links(Fleet([LinkOptions(virtual.target)]), make=lambda *_: virtual)
    return RemoteVerifier(links, Context(PROMPT), Opening("00" * 8, PROMPT), patience), virtual


def seconds(clock: Clock, verifier: RemoteVerifier, error: type[CloudError] | None) -> float:
    """How long a verdict, or this error, took."""
    began = clock.now
    if error is None:
        assert verifier.verify(BLOCK, ()) == Verdict(0, 0, 5)
    else:
        with pytest.raises(error):
            verifier.verify(BLOCK, ())
    return clock.now - began


GONE: dict[str, dict[str, Any]] = {
    "nothing comes back": {"rtt_s": None},
    "refuses connections": {"refuses": True},
    "more than half a second away": {"rtt_s": 0.55},
    "far, and never connected in time": {"rtt_s": 0.2, "connect_s": 1.0},
    "fails each time": {"refusals": (CloudLost("reset"),) * 999, "rtt_s": None},
}
THERE: dict[str, dict[str, Any]] = {
    "near": {},
    "160 ms away, behind TLS": {"rtt_s": 0.16, "connect_s": 3 * 0.16},
    "400 ms away": {"rtt_s": 0.4},
    "busy for ten seconds": {"busy_s": 10.0},
    "160 ms away and busy for ten seconds": {"rtt_s": 0.16, "busy_s": 10.0},
    "full for a while": {"refusals": (CloudBusy("full"),) * 6},
    "limited for three seconds": {"refusals": (RateLimited("later", retry_after_s=1.5),) * 2},
    "cut once": {"refusals": (CloudLost("reset"),)},
}


@pytest.mark.parametrize("link", GONE.values(), ids=GONE)
def test_a_gated_run_goes_on_alone_within_a_second_and_then_at_once(clock: Clock, link: dict[str, Any]) -> None:
    verifier, virtual = asked(clock, Patience(30.0, falls_back=True), **link)
    assert 0.3 < seconds(clock, verifier, CloudLost) < EDGE_S
    assert verifier.spent().rtt_ms > 0
    num_verifies = virtual.num_verifies
    assert seconds(clock, verifier, CloudLost) == 0
    assert virtual.num_verifies == num_verifies and verifier.spent().rtt_ms == 0
    verifier.close()


@pytest.mark.parametrize("falls_back", [True, False])
@pytest.mark.parametrize("link", THERE.values(), ids=THERE)
def test_a_cloud_that_is_far_busy_full_or_limited_is_not_gone(
    clock: Clock, link: dict[str, Any], falls_back: bool
) -> None:
    verifier, _ = asked(clock, Patience(30.0, falls_back=falls_back), **link)
    took_s = seconds(clock, verifier, None)
    assert verifier.spent().rtt_ms == pytest.approx(took_s * 1e3)
    verifier.close()


@pytest.mark.parametrize("timeout_s", [0.6, 3.0, 30.0])
@pytest.mark.parametrize("link", [{"rtt_s": None}, {"refuses": True}], ids=["nothing comes back", "refuses"])
def test_where_all_is_verified_a_cloud_that_is_gone_is_waited_for_as_long_as_was_said(
    clock: Clock, link: dict[str, Any], timeout_s: float
) -> None:
    patience = Patience(timeout_s)
    verifier, _ = asked(clock, patience, **link)
    took_s = seconds(clock, verifier, CloudTimeout)
    one_try_s = 0.3 + patience.ping_s
    assert timeout_s - 1e-6 <= took_s <= timeout_s + one_try_s
    assert verifier.spent().rtt_ms == pytest.approx(took_s * 1e3)
    verifier.close()


@pytest.mark.parametrize("falls_back", [True, False])
@pytest.mark.parametrize("refusal", [CloudBusy("full"), RateLimited("later", retry_after_s=0.7)])
def test_a_cloud_that_stays_full_is_waited_for_as_long_as_was_said(
    clock: Clock, refusal: SkydraftError, falls_back: bool
) -> None:
    verifier, virtual = asked(clock, Patience(10.0, falls_back=falls_back), refusals=(refusal,) * 999)
    error = type(refusal) if falls_back else CloudTimeout
    assert 8.0 < seconds(clock, verifier, error) <= 10.0  # type: ignore[arg-type]
    assert virtual.num_verifies > 10
    verifier.close()
