"""Sessions: the target's side of each generation, their owners, and the order of eviction.

An evicted or expired session costs its owner time, never tokens: the client opens it again with all committed tokens.
"""

from collections import defaultdict
from collections.abc import Callable, Container
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from skydraft.access.limits import Limits
from skydraft.access.shares import Shares
from skydraft.config import Execution
from skydraft.decoding.race.branch import Branch, Worth
from skydraft.decoding.verification import TargetSession
from skydraft.engines.base import Engine
from skydraft.errors import Diverged, ProtocolError, SessionNotFound, SessionTaken, TargetChanged, VocabularyMismatch
from skydraft.protocol.codec import digest, short_fingerprint, target_id
from skydraft.protocol.values import OpenCall, Opening, TargetId, VerifyCall
from skydraft.types import Reuse, Verdict

_LEFT_S = 10.0  # seconds after which an idle session counts as abandoned
Key: TypeAlias = tuple[int, str]  # number and owner: two owners may have drawn the same number
_FINISHED_KEPT = 4  # finished sessions to keep for each possible one, since clients may ask for the last verdict again


@dataclass(frozen=True, slots=True)
class ServedModel:
    engine: Engine
    execution: Execution = "exact"

    @property
    def target_id(self) -> TargetId:
        return target_id(self.engine.fingerprint, self.execution, self.engine.context_len)


@dataclass(eq=False, slots=True)
class CloudSession:
    """One generation on the server. It holds KV memory from its opening to its end."""

    key: Key
    epoch: int
    opening: Opening
    target: TargetSession
    branch: Branch
    used_at: float = 0.0  # time of the last request or answer
    last: tuple[VerifyCall, Verdict] | None = None  # kept, since the answer may get lost

    @property
    def owner(self) -> str:
        return self.key[1]

    def recall(self, call: VerifyCall) -> Verdict | None:
        if self.last is None:
            return None
        last, verdict = self.last
        same = (last.base, last.catch_up_ids, last.draft_ids, last.digest)
        return verdict if same == (call.base, call.catch_up_ids, call.draft_ids, call.digest) else None

    def written_after(self, base: int) -> list[Verdict]:
        """Return the target's tokens after the first `base`, one verdict each."""
        target = self.target
        token_ids, finishes = target.generated[base:].tolist(), {target.base: target.finish}
        scores = target.scores[len(target.scores) - len(token_ids) :]
        return [
            Verdict(at, 0, token_id, finishes.get(at + 1), scores=tuple(scores[at - base : at - base + 1]))
            for at, token_id in enumerate(token_ids, base)
        ]

    def check(self, call: VerifyCall) -> None:
        """Raise BaseMismatch, Diverged or LimitExceeded unless the block extends exactly the committed tokens."""
        self.target.check(call.block, call.catch_up_ids)
        if digest(self.target.token_ids, np.array(call.catch_up_ids, np.int32)) != call.digest:
            raise Diverged(f"The two sides have different prompts, or different tokens among the first {call.base}.")


class Sessions:
    """Only this class opens, evicts and closes sessions."""

    def __init__(self, served: ServedModel, limits: Limits, clock: Callable[[], float]) -> None:
        self._served, self._engine = served, served.engine
        self._limits, self._clock = limits, clock
        self._fingerprint = short_fingerprint(served.engine.vocab.fingerprint)
        self._table: dict[Key, CloudSession] = {}
        self._worths = defaultdict[str, Worth](Worth)  # of drafts, by owner: a new session does not reset them
        self.num_evicted = 0

    def __len__(self) -> int:
        """Number of sessions with KV memory."""
        return len(self._seated())

    def _seated(self) -> list[CloudSession]:
        return [session for session in self._table.values() if session.target.is_seated]

    def __contains__(self, key: Key) -> bool:
        return key in self._table

    def admit(self, call: OpenCall | VerifyCall, owner: str, busy: Container[Key]) -> CloudSession | None:
        """Return a call's session, opened if the call has an opening; None while no KV memory is free. Sessions in
        `busy` are not evicted. Raises SessionNotFound, SessionTaken, or UsageError for an opening that is refused."""
        session, opening = self._table.get((call.session, owner)), call.opening
        if opening is None:
            if session is None or session.epoch != call.epoch:
                raise SessionNotFound(f"There is no epoch {call.epoch} of session {call.session}.")
        elif session is not None and not session.opening.begins_like(opening):
            raise SessionTaken(f"Another generation has the number {call.session}.")
        elif session is not None and call.epoch < session.epoch:
            raise SessionNotFound(f"Session {call.session} is at epoch {session.epoch} already.")
        elif session is None or call.epoch > session.epoch:
            session = self._open((call.session, owner), call.epoch, opening, busy)
        if session is not None:
            session.used_at = self._clock()
        return session

    def _open(self, key: Key, epoch: int, opening: Opening, busy: Container[Key]) -> CloudSession | None:
        before, owner = self._table.get(key), key[1]
        takes_over = before is not None and before.target.is_seated
        needs_victim = not takes_over and len(self) >= self._limits.max_sessions
        victims = self._victims(owner, busy) if needs_victim else []
        if needs_victim and not victims:
            return None
        target = self._new_target(opening)  # may raise, so it comes before an eviction
        if before is not None and takes_over:
            target.adopt(before.target.release())  # the prompt is the same, and other tokens are compared
        else:
            if victims:
                self.close(victims[0].key)
                self.num_evicted += 1
            prompt = opening.prompt
            target.adopt(self._engine.begin(prompt.token_ids, prompt.media, self._reuse(opening, owner)))
        self._table.pop(key, None)
        branch = Branch(Worth((theirs := self._worths[owner]).share, theirs))
        session = self._table[key] = CloudSession(key, epoch, opening, target, branch)
        finished = [each.key for each in self._table.values() if not each.target.is_seated]
        for old in finished[: -_FINISHED_KEPT * self._limits.max_sessions]:
            self.close(old)
        return session

    def _new_target(self, opening: Opening) -> TargetSession:
        if opening.target and not self._served.target_id.will_do_for(opening.target):
            runs = f"({self._served.execution}, a context of {self._engine.context_len} tokens)"
            says = f"This server now runs {self._engine.name} {runs}, not the target that this text was begun with."
            raise TargetChanged(says, hint="Begin the text again, or start the server as it was.")
        return TargetSession(
            self._engine, opening.prompt, opening.params,
            committed=opening.committed_ids, num_best=opening.num_best,
        )  # fmt: skip

    def check(self, call: OpenCall | VerifyCall) -> None:
        """Raise VocabularyMismatch for another vocabulary than the target's, ProtocolError for an unknown id."""
        token_ids = list[Seq[int]]()
        if isinstance(call, VerifyCall):
            token_ids += [call.catch_up_ids, call.draft_ids]
        if opening := call.opening:
            token_ids += [opening.prompt.token_ids, opening.committed_ids]
            if opening.fingerprint != self._fingerprint:  # checked before ids, whose meaning depends on it
                both = f"({opening.fingerprint[:8]}) is not the target's ({self._fingerprint[:8]})"
                says = f"The draft model's vocabulary {both}: token ids would mean different things."
                raise VocabularyMismatch(says, hint="Choose a draft model of the target's family.")
        highest = max((max(ids) for ids in token_ids if ids), default=0)
        if highest >= self._engine.vocab.size:
            raise ProtocolError(f"The vocabulary of {self._engine.vocab.size} tokens has no id {highest}.")

    def _victims(self, owner: str, busy: Container[Key]) -> list[CloudSession]:
        """Return idle sessions that may be evicted for a new one of `owner`, in order.

        Abandoned sessions go first. Then the owner with the most sessions loses its least recently used one. An owner
        with fewer sessions than `owner` loses only abandoned ones.
        """
        seats, left = self.shares, self._clock() - _LEFT_S
        idle = [session for session in self._seated() if session.key not in busy]
        may_go = [one for one in idle if one.used_at < left or seats.gives_way(one.owner, owner)]
        may_go.sort(key=lambda one: one.used_at)
        return sorted(seats.largest_first(may_go, lambda one: one.owner), key=lambda one: one.used_at >= left)

    def _reuse(self, opening: Opening, owner: str) -> Reuse | None:
        """Return the KV that may be reused: only the owner's, so that timing reveals no other owner's texts."""
        scope = f"{owner}\n{opening.cache_scope}"
        return Reuse(scope, self._served.execution == "exact") if opening.cache_scope else None

    @property
    def shares(self) -> Shares:
        return Shares(self._limits.max_sessions, held=(session.owner for session in self._seated()))

    def expire(self, busy: Container[Key]) -> None:
        """Close sessions that were idle for longer than their time to live."""
        latest = self._clock() - self._limits.session_ttl_s
        for session in list(self._table.values()):
            if session.used_at < latest and session.key not in busy:
                self.close(session.key)
        self._engine.forget_kept(self._limits.session_ttl_s)

    def close(self, key: Key, *, failed: bool = False) -> None:
        """Close a session, if it exists. The KV of a `failed` session is not reused."""
        if session := self._table.pop(key, None):
            session.target.close(failed=failed)

    def close_all(self) -> None:
        for key in list(self._table):
            self.close(key)
