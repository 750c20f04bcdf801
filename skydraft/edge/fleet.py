"""The servers behind one name: which of them are well, and which one a session goes to."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b

from skydraft.edge.link import Link, LinkOptions, Traffic
from skydraft.errors import CloudError, CloudLost, ServersDiffer, SkydraftError, TargetChanged, VocabularyMismatch
from skydraft.protocol.codec import target_id
from skydraft.protocol.values import Opening, ServerInfo, TargetId

Notify = Callable[[str], None]
_ASK_S = 3.0  # how long a server may take to say what it runs
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_GONE_S = 60.0  # so many seconds after it was lost, a server no longer keeps the others from running something else
_OTHERS_S = 0.3  # how long the others are waited for, at least, once a first server has answered
_MUST_AGREE = {
    "vocabulary": "fingerprint",
    "model": "weights",
    "execution": "execution",
    "context": "context_len",
    "longest block": "max_block",
}


@dataclass(slots=True)
class _Server:
    """What is known of a server. It is well when `error` is None; until then a thread looks after it."""

    options: LinkOptions
    error: SkydraftError | None
    info: ServerInfo | None = None  # what it said last
    was_asked: bool = False
    is_looked_after: bool = False  # by the one thread that there is for it
    lost_at: float = field(default_factory=time.monotonic)  # since when it has not been there, where it is not

    @property
    def is_gone(self) -> bool:
        """Whether it has been away for so long that what it ran then says nothing of what the others should run."""
        return isinstance(self.error, CloudLost) and time.monotonic() - self.lost_at > _GONE_S


class Fleet:
    """The servers of one list, and the one place that knows which of them are well. Connections and threads share it.

    One server alone is not watched: it is where all sessions go, well or not. Of several each is asked what it runs
    before the first session, and when it was lost, by a thread of its own until it is well. All must run the same as
    the first that were met, until all run something else; one that has been gone for a minute is not asked about.
    `notify` gets a line when a server is left out, and when it is back.
    """

    def __init__(self, options: Sequence[LinkOptions], notify: Notify = lambda line: None) -> None:
        self._is_one = len(options) == 1
        unknown = None if self._is_one else CloudLost("it has not answered yet.")
        self._servers = {each.target: _Server(each, unknown) for each in options}
        self.name = ",".join(self._servers)
        self._notify = notify
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._users: weakref.WeakSet[object] = weakref.WeakSet()  # that did not leave
        self._had_users = False
        self._is_watched = self._is_one
        self._has_looked = self._is_one
        self._standard: ServerInfo | None = None  # what the first that were met run, or all of them by now
        self._refused: list[str] = []  # servers that were not like the others when all were met

    @property
    def servers(self) -> dict[str, LinkOptions]:
        """How each server is reached, by its address, in the order given."""
        return {name: server.options for name, server in self._servers.items()}

    def home(self, number: int) -> str:
        """Where a session of this number goes as far as it is known now: by rendezvous hashing over who is well."""
        with self._changed:
            return self._home(number)

    def _home(self, number: int) -> str:
        well = [name for name, server in self._servers.items() if server.error is None]
        return max(well or self._servers, key=lambda name: blake2b(f"{number} {name}".encode(), digest_size=8).digest())

    def place(self, number: int, current: str, wait_s: float) -> str:
        """Where a session of this number goes: it stays at `current` while that is well.

        The first time waits for `wait_s` at most, until the servers have said what they run. Raises ServersDiffer, and
        CloudLost where none is well, or what they refuse this side for where all do.
        """
        if self._is_one:
            return current
        with self._changed:
            self._look_round(wait_s)
            self._refuse_unlike()
            if self._servers[current].error is None:
                return current
            if all(server.error for server in self._servers.values()):
                raise self._none_is_well()
            return self._home(number)

    def lost(self, name: str, error: SkydraftError) -> bool:
        """A server failed in this way: leave it out until it is well. Whether its sessions may go on elsewhere."""
        if self._is_one:
            return False
        with self._changed:
            was_well = self._servers[name].error is None
            if was_well:
                self._leave_out(name, error)
                self._watch(name, _FIRST_PAUSE_S)
            return was_well or self.has_other(name)

    def has_other(self, name: str) -> bool:
        """Whether a server beside this one is well."""
        with self._changed:
            return any(server.error is None for other, server in self._servers.items() if other != name)

    def look(self) -> None:
        """Raise CloudLost where none of several servers is well."""
        with self._changed:
            if all(server.error for server in self._servers.values()):
                raise self._none_is_well()

    @property
    def target(self) -> TargetId | None:
        """What all of several servers run; None of one alone, and before any was met."""
        if self._standard is None:
            return None
        info = self._standard
        return target_id(info.weights, info.execution, info.context_len)

    def is_asked_for(self, opening: Opening) -> bool:
        """Whether it asks for what all servers here run, so that one that refuses it is not like the others."""
        if self._standard is None:
            return False
        return (opening.target, opening.fingerprint) == (self.target, self._standard.fingerprint)

    def _look_round(self, wait_s: float) -> None:
        """Have asked everybody once, as long as that may take."""
        if not self._is_watched:
            self._is_watched = True
            for name in self._servers:
                self._watch(name, 0.0)
        began = time.monotonic()
        until = began + wait_s
        while not self._has_looked:
            now, servers = time.monotonic(), self._servers.values()
            is_there = any(server.error is None for server in servers)
            if is_there:
                until = min(until, now + max(_OTHERS_S, now - began))
            self._has_looked = all(server.was_asked for server in servers) or (is_there and now >= until)
            if self._has_looked or now >= until:
                return
            self._changed.wait(until - now)

    def _refuse_unlike(self) -> None:
        """Raise ServersDiffer as long as servers that never ran the same are there."""
        met = {name: server.info for name, server in self._servers.items() if server.info and server.error is None}
        if self._standard is None and met:
            usual, _ = Counter(map(_what_must_agree, met.values())).most_common(1)[0]
            self._standard = next(info for info in met.values() if _what_must_agree(info) == usual)
            for name, info in met.items():
                if unlike := difference(name, info, self._usual_one(name), self._standard):
                    self._servers[name].error = unlike
                    self._refused.append(name)
                    self._watch(name, _FIRST_PAUSE_S)
        if self._refused and (error := self._servers[self._refused[0]].error):
            raise error.with_traceback(None)

    def _meet(self, name: str, info: ServerInfo) -> bool:
        """Note what a server says that it runs; whether it is well now."""
        server, standard = self._servers[name], self._standard
        server.info = info
        unlike = difference(name, info, self._usual_one(name), standard) if standard else None
        if unlike and not self._is_general(info):
            self._leave_out(name, unlike)
            return False
        if unlike:
            self._standard = info
        for other in self._servers.values():
            if other is server or (unlike and isinstance(other.error, ServersDiffer)):
                other.error = None
        self._refused = [each for each in self._refused if self._servers[each].error]
        if server.was_asked:
            self._tell(f"The server at {name} is back.")
        server.was_asked = True
        self._changed.notify_all()
        return True

    def _usual_one(self, but: str) -> str:
        """A server that ran the standard when it was asked last, to be named beside `but`, which did not."""
        others = {name: server.info for name, server in self._servers.items() if name != but and server.info}
        found = (
            name for name, info in others.items() if self._standard and not difference(name, info, "", self._standard)
        )
        return next(found, "the others")

    def _is_general(self, info: ServerInfo) -> bool:
        """Whether all servers have said last that they run this, those that are gone left out."""
        return all(
            each.info and _what_must_agree(each.info) == _what_must_agree(info)
            for each in self._servers.values()
            if not each.is_gone
        )

    def _none_is_well(self) -> SkydraftError:
        errors = {name: server.error for name, server in self._servers.items() if server.error}
        reasons = "; ".join(f"{name}: {error.message.rstrip('.')}" for name, error in errors.items())
        first = next(iter(errors.values()))
        if any(map(_may_pass, errors.values())):
            return CloudLost(f"no server is well: {reasons}.")
        return type(first)(f"No server can be used: {reasons}.", hint=first.hint)

    def _tell(self, line: str) -> None:
        with suppress(Exception):  # a stderr that is closed must not end the thread that looks after a server
            self._notify(line)

    def _leave_out(self, name: str, error: SkydraftError) -> None:
        server = self._servers[name]
        is_news = not server.was_asked or type(server.error) is not type(error)
        if server.error is None or (is_news and not isinstance(error, CloudLost)) or not server.was_asked:
            self._tell(f"The server at {name} is left out: {error.message}")
        if not (server.was_asked and isinstance(server.error, CloudLost)):
            server.lost_at = time.monotonic()
        server.error, server.was_asked = error, True
        self._refused = [each for each in self._refused if each != name or isinstance(error, ServersDiffer)]
        self._changed.notify_all()

    def _watch(self, name: str, pause_s: float) -> None:
        if self._servers[name].is_looked_after:
            return
        self._servers[name].is_looked_after = True
        threading.Thread(target=self._look_after, args=(name, pause_s), name="look after", daemon=True).start()

    def _look_after(self, name: str, pause_s: float) -> None:
        """Ask a server what it runs until it is well."""
        link = Link(self._servers[name].options)
        while not self._closed.wait(pause_s) and (self._users or not self._had_users):
            pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            try:
                info = link.info(_ASK_S)
            except SkydraftError as error:
                link.reconnect()
                with self._changed:
                    self._leave_out(name, error)
            else:
                with self._changed:
                    # Another server that changed may have made this one well meanwhile.
                    if self._servers[name].error is None or self._meet(name, info):
                        self._servers[name].is_looked_after = False
                        break
        link.close()

    def enter(self, user: object) -> None:
        """Somebody uses the servers, until he leaves or is no more: after the last one nobody is looked after."""
        with self._changed:
            self._had_users = True
            self._users.add(user)

    def leave(self, user: object) -> None:
        """He does not use them any more."""
        with self._changed:
            self._users.discard(user)
            if not self._users:
                self._closed.set()


class Links:
    """The connections of one generation at a time to the servers of a fleet, each made when it is needed first."""

    def __init__(self, fleet: Fleet, make: Callable[[LinkOptions, Traffic], Link] = Link) -> None:
        self.fleet = fleet
        self.name = fleet.name
        self._make = make
        self._made: dict[str, Link] = {}
        self._traffic = Traffic()  # of all links: a session may move in the middle of a round
        self._traceparent = ""
        self._is_closed = False
        fleet.enter(self)

    def _to(self, name: str) -> Link:
        if name not in self._made:
            self._made[name] = self._make(self.fleet.servers[name], self._traffic)
            if self._traceparent:
                self._made[name].carry(self._traceparent)
            if self._is_closed:
                self._made[name].close()
        return self._made[name]

    def carry(self, traceparent: str) -> None:
        """Tell every server which trace belongs to the generation that begins; "" for none."""
        if traceparent != self._traceparent:
            self._traceparent = traceparent
            for link in self._made.values():
                link.carry(traceparent)

    def home(self, number: int) -> Link:
        """The connection that a session of this number would have now. Nobody is asked."""
        return self._to(self.fleet.home(number))

    def place(self, number: int, link: Link, wait_s: float) -> Link:
        """The connection for a session of this number, which stays at `link` while that one's server is well.

        Raises what `Fleet.place` raises.
        """
        return self._to(self.fleet.place(number, link.target, wait_s))

    def look(self, timeout_s: float) -> None:
        """Raise CloudError where no server is there to be used."""
        if len(self.fleet.servers) > 1:
            self.fleet.look()
            return
        (name,) = self.fleet.servers
        self._to(name).reconnect()
        self._to(name).info(timeout_s)

    def close(self) -> None:
        """Let go of all connections."""
        if not self._is_closed:
            self._is_closed = True
            for link in self._made.values():
                link.close()
            self.fleet.leave(self)


def _may_pass(error: SkydraftError) -> bool:
    """Whether waiting may help. What a server refused because it changed is not clear before it was asked again."""
    if isinstance(error, TargetChanged | VocabularyMismatch):
        return True
    return error.retryable or (isinstance(error, CloudError) and error.is_outage)


def difference(name: str, info: ServerInfo, first: str, standard: ServerInfo) -> ServersDiffer | None:
    """What keeps a text of the server `first` from going on at `name`, if anything does."""
    for what, name_of_field in _MUST_AGREE.items():
        mine, theirs = getattr(info, name_of_field), getattr(standard, name_of_field)
        if mine == theirs:
            continue
        if what in ("vocabulary", "model"):
            mine, theirs = (f"{each.model} ({getattr(each, name_of_field)[:8]})" for each in (info, standard))
        return ServersDiffer(
            f"The servers {name} and {first} differ in their {what}: {mine} and {theirs}.",
            hint="Name servers that run the same.",
        )
    return None


def _what_must_agree(info: ServerInfo) -> tuple[object, ...]:
    return tuple(getattr(info, field) for field in _MUST_AGREE.values())
