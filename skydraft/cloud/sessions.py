"""Sessions: the target's side of each generation, who may use it, and who has to make room.

An evicted or expired session costs its owner time, never tokens: it is opened again with all that is committed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq

import numpy as np

from skydraft.cloud.judge import Seats, SessionTarget
from skydraft.cloud.limits import Limits
from skydraft.errors import (
    Diverged,
    ProtocolError,
    SessionNotFound,
    SessionTaken,
    TargetChanged,
    UnknownModel,
    VocabularyMismatch,
)
from skydraft.protocol.codec import digest, short_fingerprint
from skydraft.protocol.values import Opening, SessionCall, VerifyCall
from skydraft.types import Reuse, Verdict

_LEFT_S = 10.0  # seconds after which an idle session may have been left
_FINISHED_KEPT = 4  # finished sessions kept per seat, for a verdict that has to be said again


class CloudSession:
    """One generation on the server. It holds a seat, which is KV memory, from its opening to its end."""

    def __init__(self, number: int, owner: str, epoch: int, opening: Opening, target: SessionTarget) -> None:
        self.number = number
        self.owner = owner
        self.epoch = epoch
        self.opening = opening
        self.target = target
        self._used_at = 0.0
        self._last: tuple[VerifyCall, Verdict] | None = None

    @property
    def used_at(self) -> float:
        """When it was last asked for anything, or answered."""
        return self._used_at

    def touch(self, now: float) -> None:
        """Note that it is in use."""
        self._used_at = now

    def recall(self, call: VerifyCall) -> Verdict | None:
        """The verdict on this very block, if it was the last one judged."""
        if self._last is None:
            return None
        last, verdict = self._last
        same = (last.base, last.catch_up_ids, last.draft_ids, last.digest)
        return verdict if same == (call.base, call.catch_up_ids, call.draft_ids, call.digest) else None

    def remember(self, call: VerifyCall, verdict: Verdict) -> None:
        """Keep a verdict in case its answer is lost. A finished generation gives its seat back."""
        self._last = (call, verdict)
        if verdict.finish:
            self.target.close()

    def check(self, call: VerifyCall) -> None:
        """Raise BaseMismatch, Diverged or LimitExceeded unless the block extends just what is committed here."""
        self.target.check(call.block, call.catch_up_ids)
        if digest(self.target.token_ids, np.array(call.catch_up_ids, np.int32)) != call.digest:
            raise Diverged(f"The two sides hold different prompts, or different tokens among the first {call.base}.")


class Sessions:
    """All sessions of a server, by number. The only place where they are opened, evicted and closed."""

    def __init__(self, seats: Seats, limits: Limits, clock: Callable[[], float]) -> None:
        self._seats = seats
        self._served = seats.served
        self._limits = limits
        self._clock = clock
        self._fingerprint = short_fingerprint(seats.served.vocab.fingerprint)
        self._table: dict[int, CloudSession] = {}
        self.num_evicted = self.num_expired = 0

    def __len__(self) -> int:
        """How many hold a seat."""
        return len(self._seated())

    def _seated(self) -> list[CloudSession]:
        return [session for session in self._table.values() if session.target.is_seated]

    def is_theirs(self, number: int, owner: str) -> bool | None:
        """Whether the session of that number is this owner's; None where there is none."""
        session = self._table.get(number)
        return None if session is None else session.owner == owner

    def admit(self, call: SessionCall | VerifyCall, owner: str, busy: Collection[int]) -> CloudSession | None:
        """The session of a call, opened first where the call says so; None while no seat is free.

        `busy` are numbers of sessions that must not be evicted. Raises SessionNotFound, SessionTaken, and for an
        opening that this server does not take UsageError.
        """
        session = self._table.get(call.session)
        opening = call.opening
        if opening is None:
            if session is None or session.owner != owner or session.epoch != call.epoch:
                raise SessionNotFound(f"There is no epoch {call.epoch} of session {call.session}.")
        else:
            if session is not None and (session.owner != owner or not session.opening.begins_like(opening)):
                raise SessionTaken(f"Another generation has the number {call.session}.")
            if session is not None and call.epoch < session.epoch:
                raise SessionNotFound(f"Session {call.session} is at epoch {session.epoch} already.")
            if session is None or call.epoch > session.epoch:
                session = self._open(call, opening, owner, busy)
        if session is not None:
            session.touch(self._clock())
        return session

    def _open(
        self, call: SessionCall | VerifyCall, opening: Opening, owner: str, busy: Collection[int]
    ) -> CloudSession | None:
        before = self._table.get(call.session)
        takes_over = before is not None and before.target.is_seated
        if not takes_over and not self._can_seat(owner, busy):
            return None
        target = self._new_target(opening)
        if before and takes_over:
            self._seats.hand_over(before.target, target)
        else:
            self._seat(target, opening, owner, busy)
        session = CloudSession(call.session, owner, call.epoch, opening, target)
        self._table.pop(call.session, None)
        self._table[call.session] = session
        self._forget_finished()
        return session

    def _new_target(self, opening: Opening) -> SessionTarget:
        if opening.fingerprint != self._fingerprint:
            raise VocabularyMismatch(
                f"The draft model's vocabulary ({opening.fingerprint[:8]}) is not the target's "
                f"({self._fingerprint[:8]}): token ids would mean different things.",
                hint="Choose a draft model of the target's family.",
            )
        if opening.target and not self._served.target_id.will_do_for(opening.target):
            raise TargetChanged(
                f"This server runs {self._served.name} now ({self._served.execution}, a context of "
                f"{self._served.context_len} tokens): not what this text was begun with.",
                hint="Begin the text again, or start the server as it was.",
            )
        if opening.model not in ("", self._served.name):
            raise UnknownModel(f"This server runs {self._served.name}, not {opening.model}.")
        self.check_ids(opening.prompt.token_ids, opening.committed_ids)
        return self._seats.target(opening)

    def check_ids(self, *token_ids: Seq[int]) -> None:
        """Raise ProtocolError for an id that is no token of the target."""
        highest = max((max(ids) for ids in token_ids if ids), default=0)
        if highest >= self._served.vocab.size:
            raise ProtocolError(f"The vocabulary of {self._served.vocab.size} tokens has no id {highest}.")

    def _can_seat(self, owner: str, busy: Collection[int]) -> bool:
        """Whether there is KV memory for one more session of this owner, or somebody idle to take it from."""
        return not self._rivals(owner) or bool(self._victims(owner, busy))

    def _seat(self, target: SessionTarget, opening: Opening, owner: str, busy: Collection[int]) -> None:
        """Give it KV memory, taken from an idle session if need be."""
        if self._rivals(owner):
            self.close(self._victims(owner, busy)[0].number)
            self.num_evicted += 1
        self._seats.seat(target, opening, self._reuse(opening, owner))

    def _victims(self, owner: str, busy: Collection[int]) -> list[CloudSession]:
        """Idle sessions that may go for one more of `owner`, who goes first in front.

        Those that seem left, then those of whoever has the most seats, and of them the least recently used. Nobody
        takes a seat from an owner with fewer of them.
        """
        seats = Counter(session.owner for session in self._seated()) + Counter([owner])
        left = self._clock() - _LEFT_S
        idle = [session for session in self._rivals(owner) if session.number not in busy]
        may_go = [session for session in idle if session.used_at < left or seats[session.owner] >= seats[owner]]
        return sorted(may_go, key=lambda one: (one.used_at >= left, -seats[one.owner], one.used_at))

    def _reuse(self, opening: Opening, owner: str) -> Reuse | None:
        """Whose KV it may take up: that of the owner alone, so that nobody learns, by its time, of another's text."""
        scope = f"{owner}\n{opening.cache_scope}"
        return Reuse(scope, self._served.execution == "exact") if opening.cache_scope else None

    def _rivals(self, owner: str) -> list[CloudSession]:
        """Sessions one of which must go before `owner` gets a seat: its own at its own limit, all where all is full."""
        seated = self._seated()
        own = [session for session in seated if session.owner == owner]
        if 0 < self._limits.sessions_per_token <= len(own):
            return own
        return seated if len(seated) >= self._limits.max_sessions else []

    def has_more_seats(self, owner: str, other: str) -> bool:
        """Whether `owner` would still have as many as `other` after giving one to it."""
        seats = Counter(session.owner for session in self._seated())
        return seats[owner] - 1 >= seats[other] + 1

    def _forget_finished(self) -> None:
        finished = [number for number, session in self._table.items() if not session.target.is_seated]
        for number in finished[: -_FINISHED_KEPT * self._limits.max_sessions]:
            self.close(number)

    def expire(self, busy: Collection[int]) -> int:
        """Close sessions idle for longer than their time to live; returns how many of them had not finished."""
        latest = self._clock() - self._limits.session_ttl_s
        expired = [n for n, session in self._table.items() if session.used_at < latest and n not in busy]
        num_unfinished = sum(self._table[number].target.finish is None for number in expired)
        for number in expired:
            self.close(number)
        self.num_expired += num_unfinished
        self._seats.forget_kept(self._limits.session_ttl_s)
        return num_unfinished

    def close(self, number: int, owner: str | None = None, *, failed: bool = False) -> None:
        """Forget a session, if it is there and `owner`, where given, is its owner.

        Nothing of one that `failed` is reused.
        """
        session = self._table.get(number)
        if session is not None and owner in (None, session.owner):
            session.target.close(failed=failed)
            del self._table[number]

    def close_all(self) -> None:
        """Forget all of them."""
        for number in list(self._table):
            self.close(number)
