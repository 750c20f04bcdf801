"""The verifier at the other end of a link. It blocks the thread of one generation; the work is on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from skydraft.decoding.context import Committed
from skydraft.decoding.receipt import Sent
from skydraft.edge.channel import Awaited, Waiting
from skydraft.edge.line import ServerList, TextSession
from skydraft.edge.recovery import Recovery, Situation, recover
from skydraft.engines.vocab import Vocab
from skydraft.errors import (
    BudgetSpent,
    CloudError,
    CloudFailure,
    CloudLost,
    CloudTimeout,
    LimitExceeded,
    RateLimited,
    SessionTaken,
    SkydraftError,
    TargetChanged,
)
from skydraft.types import Cost, DraftBlock, LinkCost, Verdict

T = TypeVar("T")
Notify = Callable[[str], None]
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0  # between two probes of a lost cloud
_PROBE_S, _SILENT_S = 3.0, 1.0  # for one ping; after the latter a text that waits for the cloud says so
_LAST_WAIT_S = 0.3  # at the end of a text, for a server that was not needed
_QUIET_S = 30.0  # of a server that comes and goes, one outage in so many seconds is told


def silent(line: str) -> None:
    """Ignore the line."""


class Notices:
    """Lines about a cloud, for its user: each goes to `tell`, but of outages that follow each other only some."""

    def __init__(self, tell: Notify = silent) -> None:
        self.tell = tell
        self._told_at = -_QUIET_S

    def may_tell_outage(self, now: float) -> bool:
        """Whether an outage that begins at `now`, in seconds, is told: not soon after another."""
        if is_told := now - self._told_at >= _QUIET_S:
            self._told_at = now
        return is_told


@dataclass(frozen=True, slots=True)
class Patience:
    """The patience of a text: it waits `timeout_s` seconds for an answer, and less for a sign of life."""

    timeout_s: float
    falls_back: bool = False
    has_others: bool = False

    @property
    def waiting(self) -> Waiting:
        """Times of waiting for an answer: shorter if the text can continue alone or at another server."""
        quick_s = 0.3 if self.falls_back else 2.0
        ping_s = (0.3 if self.has_others else 0.5) if self.falls_back else (2.0 if self.has_others else 5.0)
        return Waiting(self.timeout_s, min(quick_s, self.timeout_s), min(ping_s, self.timeout_s))


@dataclass(slots=True)
class _Tries:
    """Failed tries of one verification."""

    began: float
    num: int = 0
    num_reopened: int = 0
    num_failures: int = 0
    is_told: bool = False
    at: set[str] = field(default_factory=set)  # tried servers


class RemoteVerifier:
    """`Verifier` at one of several servers, for one generation whose committed tokens are `context`.

    Its session stays at its server until that server is lost. It blocks one thread at a time.
    """

    def __init__(
        self, servers: ServerList, context: Committed, session: TextSession, patience: Patience, notices: Notices
    ) -> None:
        self._servers = servers
        self._loop = servers.loop
        self._context = context
        self._session = session
        self._patience = patience
        self._waiting = patience.waiting
        self._notices = notices
        self._max_block: int | None = None  # the longest block that the server accepts, after it refused one
        self._written: deque[Verdict] = deque()  # written tokens that the text does not have yet
        self._ahead: Awaited[None] | None = None  # an opening under way
        self._pending: Awaited[Any] | None = None  # the current or last wait
        self._outage: CloudError | None = None  # the reason why the text continues alone
        self._probing: asyncio.Task[None] | None = None
        self._greeting: Awaited[None] | None = None
        self._news: list[str] = []
        self._is_used = self._is_cancelled = self._is_closed = self._asked = False
        self._rtt_ms = 0.0
        self._taken = LinkCost()  # the part of the session's cost that `spent` has returned

    def verify(self, block: DraftBlock, catch_up: Seq[int], write: int = 0) -> Verdict:
        """The cloud's verdict. Raises CloudError if the cloud is lost for good, or for now if the text falls back."""
        self._asked = False
        if self._written:
            return self._written.popleft()
        self._tell()
        if (gone := self._outage) is not None:
            raise gone.with_traceback(None)  # else its traceback would keep each round alive
        began = time.perf_counter()
        try:
            return self._wait(self._persist(lambda: self._next(block, tuple(catch_up), write)))
        finally:
            self._rtt_ms += (time.perf_counter() - began) * 1e3
            self._tell()

    @property
    def asked(self) -> bool:
        """Whether the last `verify` asked the target, and did not only take a token that it wrote."""
        return self._asked

    def stop(self) -> bool:
        """Stop the target's writing. False while `verify` must still take written tokens."""
        if self._session.is_writing:
            began = time.perf_counter()
            self._wait(self._stop())
            self._rtt_ms += (time.perf_counter() - began) * 1e3
        return not self._written

    def spent(self) -> LinkCost:
        """Time waited for verdicts, and bytes of all messages, since the last call."""
        if self._greeting is not None:
            if self._context.finish is not None:
                self._loop.begin(self._wait_for_greeting(self._greeting)).result()
            self._tell()
        before, self._taken = self._taken, self._session.spent
        rtt_ms, self._rtt_ms = self._rtt_ms, 0.0
        return replace(self._taken - before, rtt_ms=rtt_ms)

    @property
    def sent(self) -> Sent:
        """What was sent of the text."""
        return self._session.sent

    @property
    def link(self) -> LinkCost:
        """The cost of all messages so far."""
        return self._session.spent

    def open_ahead(self) -> None:
        """Open the session now, so that the prompt is in the target's cache at the first verification."""
        self._is_used = True
        message = self._session.opening_message()  # in this thread, which may commit tokens meanwhile
        self._ahead = self._loop.begin(self._session.open(message, self._waiting))

    def greet(self, vocab: Vocab) -> None:
        """See in the background whether the cloud is there: a wrong address is said even if nothing needs it."""
        self._is_used = True
        self._greeting = self._loop.begin(self._greet(vocab))

    async def _greet(self, vocab: Vocab) -> None:
        """Ask twice: gRPC may remember that a server was away a moment ago."""
        for is_last in (False, True):
            try:
                await self._servers.greet(self._session.number, vocab, _PROBE_S)
                return
            except SkydraftError as error:
                channels, is_lost = self._servers.in_order(self._session.number), isinstance(error, CloudLost)
                is_met = is_lost and any(channel.heard_at for channel in channels)  # by another text
                if self._pending is not None or self._outage is not None or self._is_closed or is_met:
                    return  # the verification finds out by itself, or has
                if is_lost and not is_last:
                    for channel in channels:
                        await channel.renew()
                elif isinstance(error, CloudError) and error.is_outage:
                    self._go_alone(error)
                    return
                else:
                    self._news.append(f"The cloud at {self._servers.name} cannot be used: {error.line}")
                    return

    async def _wait_for_greeting(self, greeting: Awaited[None]) -> None:
        await asyncio.wait((greeting.task,), timeout=_LAST_WAIT_S)

    def cancel(self) -> None:
        """End the current wait with CloudLost. Any thread may call this."""
        self._is_cancelled = True
        if (pending := self._pending) is not None:
            pending.cancel()

    def close(self) -> None:
        """End the session at the server. Never waits, since a finalizer may call this."""
        if self._is_used and not self._is_closed:
            self._is_closed = True
            self._servers.end(self._end)

    async def _end(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
        for pending in (self._pending, self._ahead):
            if pending is not None and not pending.task.done():
                pending.task.cancel()
                await asyncio.wait((pending.task,))
        await self._session.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Block until work on the loop is done. Raises CloudLost if it was cancelled."""
        self._is_used = True
        self._pending = pending = self._loop.begin(work)
        if self._is_cancelled:
            pending.cancel()
        return pending.result()

    def _tell(self) -> None:
        news, self._news = self._news, []
        for line in news:
            self._notices.tell(line)

    async def _persist(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Try until there is an answer, with a recovery after each failed try."""
        tries = _Tries(self._loop.now())
        while True:
            try:
                if self._ahead is not None:
                    ahead, self._ahead = self._ahead, None
                    await ahead.task
                return await ask()
            except SkydraftError as error:
                await self._mend(error, tries)

    async def _mend(self, error: SkydraftError, tries: _Tries) -> None:
        """Prepare another try. Raises the error if no other try makes sense."""
        channel, now = self._session.channel, self._loop.now()
        tries.at.add(channel.target)
        if isinstance(error, CloudLost):
            self._servers.lost(channel)
        if isinstance(error, TargetChanged) and self._servers.changed(channel) and not self._context.num_seen:
            self._session.expect(None)  # all servers of the list run another target now
            self._session.reopen()
            return
        others = [each for each in self._servers.in_order(self._session.number) if each.target not in tries.at]
        silent_s = now - max(tries.began, channel.heard_at)
        recovery = recover(
            error,
            Situation(
                self._patience.timeout_s, self._patience.falls_back, bool(others), tries.num, tries.num_reopened,
                tries.num_failures, now - tries.began, silent_s,
            ),
        )  # fmt: skip
        if recovery.step in ("alone", "give up"):
            self._end_tries(error, recovery, now - tries.began)
        if isinstance(error, CloudLost) and now - tries.began > _SILENT_S and not tries.is_told:
            tries.is_told = True
            self._notices.tell(f"{self._gone(error)}; waiting up to {self._patience.timeout_s:g} s for it.")
        tries.num += 1
        tries.num_failures += isinstance(error, CloudFailure)
        tries.num_reopened += recovery.step == "open again"
        if recovery.step == "elsewhere":
            self._session.reopen(others[0])
        elif recovery.step == "open again":
            self._session.reopen(renumber=isinstance(error, SessionTaken))
        else:
            tries.at.clear()  # after a pause all servers may be tried again
            if recovery.step == "reconnect":
                await self._session.renew()
        await asyncio.sleep(recovery.pause_s)

    def _end_tries(self, error: SkydraftError, recovery: Recovery, waited_s: float) -> None:
        if recovery.step == "give up":
            if recovery.is_late:
                raise too_late(self._servers.name, error, waited_s) from error
            raise error
        gone = error if isinstance(error, CloudError) else CloudFailure(str(error))
        self._go_alone(gone, is_final=recovery.is_final)
        raise gone

    def _go_alone(self, gone: CloudError, *, is_final: bool = False) -> None:
        self._outage = gone
        if is_told := self._notices.may_tell_outage(time.monotonic()):
            self._news.append(f"{self._gone(gone)}; going on alone.")
        if not is_final:
            self._probing = asyncio.ensure_future(self._probe(gone, is_told=is_told))

    def _gone(self, error: CloudError) -> str:
        what = "may not be asked any more" if isinstance(error, BudgetSpent) else "is gone"
        return f"The cloud at {self._servers.name} {what} ({error.line.rstrip('.')})"

    async def _probe(self, gone: CloudError, *, is_told: bool) -> None:
        """Ping the cloud until it is back."""
        # A server that answers, but fails, may answer the next ping at once and fail again.
        began, pause_s = time.monotonic(), _FIRST_PAUSE_S if isinstance(gone, CloudLost) else _LONGEST_PAUSE_S
        if isinstance(gone, RateLimited):
            pause_s = max(pause_s, gone.retry_after_s)
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            for channel in self._servers.in_order(self._session.number):
                try:
                    await channel.ping(_PROBE_S)
                except SkydraftError:
                    await channel.renew()
                    continue
                self._session.reopen(channel)
                if is_told:
                    self._news.append(f"The cloud is back after {time.monotonic() - began:.1f} s.")
                self._outage = None
                return

    async def _next(self, block: DraftBlock, catch_up: tuple[int, ...], write: int) -> Verdict:
        """The next token that the target wrote, or the verdict on a block."""
        while self._session.is_writing:
            if await self._read_written():
                return self._written.popleft()
        self._asked = True
        if self._max_block is not None and len(block.token_ids) > self._max_block:
            return await self._judge_in_parts(block, catch_up, write, self._max_block)
        try:
            return await self._session.judge(block, catch_up, write, self._waiting)
        except LimitExceeded:
            most = await self._session.channel.max_block(self._patience.timeout_s)
            if len(block.token_ids) <= most:
                raise
            self._max_block = most
            return await self._judge_in_parts(block, catch_up, write, most)

    async def _judge_in_parts(self, block: DraftBlock, catch_up: tuple[int, ...], write: int, most: int) -> Verdict:
        """The verdict on a block that is longer than the server accepts: parts are judged until one is rejected.

        A part is corrected only where the whole block is, so the target writes on after the right token.
        """
        token_ids, num_accepted = block.token_ids, 0
        part = DraftBlock(block.base, token_ids[:most])
        first = verdict = await self._session.judge(part, catch_up, write, self._waiting)
        cost = first.cost
        while True:
            num_accepted += verdict.num_accepted
            following = token_ids[num_accepted : num_accepted + 1]
            is_drafted = verdict.token_id is not None and following == (verdict.token_id,)
            ahead: tuple[int, ...] = ()
            if not is_drafted and following and self._session.top and verdict.num_accepted == len(part.token_ids):
                # The target would have written another token, but with `top` it may accept the drafted one.
                self._session.reopen()
                ahead = catch_up + token_ids[:num_accepted]
            elif verdict.finish and is_drafted:
                num_accepted, verdict = num_accepted + 1, replace(verdict, num_accepted=1, token_id=None)
                break
            elif verdict.finish or not is_drafted:
                break
            else:
                num_accepted += 1
            part = DraftBlock(block.base + num_accepted, token_ids[num_accepted : num_accepted + most])
            to_write = write if part.token_ids else 0  # a whole block was accepted: this is its bonus token
            verdict = await self._session.judge(part, ahead, to_write, self._waiting, token_ids[:num_accepted])
            cost += verdict.cost
        return replace(first, num_accepted=num_accepted, token_id=verdict.token_id, finish=verdict.finish, cost=cost)

    async def _read_written(self) -> bool:
        """Read the next written tokens, each as a verdict of its own; returns whether there were any."""
        written = await self._session.next_written(self._waiting)
        last = len(written.token_ids) - 1
        for index, token_id in enumerate(written.token_ids):
            finish, cost = (written.finish if index == last else None), (written.cost if index == 0 else Cost())
            self._written.append(Verdict(written.base + index, 0, token_id, finish, cost=cost))
        return bool(written.token_ids)

    async def _stop(self) -> None:
        """Read all tokens that the target has written. If that fails, the next verification reopens the session."""
        tries = _Tries(self._loop.now())
        self._session.stop()
        try:
            while self._session.is_writing:
                if self._loop.now() - tries.began > self._patience.timeout_s:
                    raise CloudFailure(f"The cloud at {self._session.channel.target} goes on after it was stopped.")
                await self._read_written()
        except SkydraftError as error:
            self._session.break_off()
            if isinstance(error, CloudLost):  # noticed once: the text does not wait for a second sign of it
                with suppress(SkydraftError):
                    await self._mend(error, tries)


def too_late(name: str, error: SkydraftError, waited_s: float) -> CloudTimeout:
    return CloudTimeout(
        f"The cloud at {name} did not answer for {waited_s:.1f} s: {error.message}",
        hint=f"Run: skydraft doctor --cloud {name}. To wait longer: --cloud-timeout.",
    )
