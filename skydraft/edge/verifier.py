"""The verifier at the other end of a link. It blocks the thread of one generation; the work is on the event loop."""

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from skydraft import errors
from skydraft.decoding.context import Context
from skydraft.decoding.request import GenerateRequest
from skydraft.edge.channel import Awaited, Waiting, Waits, seen, shared_loop
from skydraft.edge.recovery import Recovery, Situation, recover
from skydraft.edge.server import Server
from skydraft.edge.servers import Servers, of_each
from skydraft.engines.vocab import Vocab
from skydraft.errors import CloudError, CloudFailure, CloudLost, CloudTimeout, SkydraftError
from skydraft.types import Draft, DraftBlock, LinkCost, Prompt, Verdict

T = TypeVar("T")
Notify = Callable[[str], None]
Came = Callable[[int, Seq[int], int], None]
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0  # between two probes of a lost cloud
_PROBE_S, SILENT_S = 3.0, 1.0  # for one ping; after the latter a text that waits for the cloud says so
_QUIET_S = 30.0  # of a server that comes and goes, one outage in so many seconds is told


def silent(line: str) -> None: ...


def ignored(base: int, token_ids: Seq[int], num_accepted: int) -> None: ...


class Notices:
    """Lines for the user of a cloud: each goes to `tell`, but of outages that follow each other only some."""

    def __init__(self, tell: Notify = silent) -> None:
        self.tell = tell
        self._said_at = -_QUIET_S

    def may_tell_outage(self, now: float) -> bool:
        if is_new := now - self._said_at >= _QUIET_S:
            self._said_at = now
        return is_new


def waiting_for(timeout_s: float, *, falls_back: bool, has_others: bool) -> Waiting:
    """How long a text waits for one answer."""
    quick_s = 0.3 if falls_back else 2.0
    ping_s = (0.3 if has_others else 0.5) if falls_back else (2.0 if has_others else 5.0)
    return Waiting(timeout_s, min(quick_s, timeout_s), min(ping_s, timeout_s))


class RemoteVerifier:
    """`Verifier` at one of several servers, for one generation whose committed tokens are `context`.

    Its text stays at its server until that server is lost. It blocks one thread at a time. Raises OptionError for what
    the servers cannot follow.
    """

    def __init__(
        self, servers: Servers, context: Context, prompt: Prompt, vocab: Vocab, request: GenerateRequest,
        waiting: Waiting, notices: Notices, *, falls_back: bool,
    ) -> None:  # fmt: skip
        self.called = self._is_closed = False
        self._servers, self._context, self._notices = servers, context, notices
        self._waiting, self._falls_back = waiting, falls_back
        self._loop, self._key = shared_loop(), random.random()
        self._server = servers.in_order(self._key)[0]
        self._met: Server | None = None  # the server that has the text, once it has answered
        self._text = self._server.begin(context, prompt, vocab, request)
        self._text.target = servers.target
        self.sent = self._text.sent
        self.max_block: int | None = None  # what the server accepts, after it refused a longer one
        self._written: deque[Verdict] = deque()  # written tokens that the text does not have yet
        self._reading: asyncio.Task[None] | None = None  # what the target writes on
        self._has_come = asyncio.Event()  # something that it wrote, or its end
        self.came: Came = ignored
        self._ahead: Awaited[None] | None = None  # an opening under way
        self._outage: CloudError | None = None  # the reason why the text continues alone
        self._probing: asyncio.Task[None] | None = None
        self._unsaid: list[str] = []  # lines for the user, which the generation's thread says
        self._waits = Waits()
        self.cancel = self._waits.cancel
        self._rtt_ms = 0.0
        self._taken = LinkCost()  # the part of the text's cost that `take_cost` has returned

    @property
    def link(self) -> LinkCost:
        return self._text.spent

    def verify(self, block: DraftBlock, catch_up: Seq[int], write: int = 0) -> Verdict:
        """The cloud's verdict. Raises CloudError if the cloud is lost for good, or for now if the text falls back."""
        self.called = False
        if self._written:
            return self._written.popleft()
        self._say()
        if (gone := self._outage) is not None:
            raise gone.with_traceback(None)  # else its traceback would keep each round alive
        try:
            return self._wait(self._persist(lambda: self._next(block, tuple(catch_up), write)))
        finally:
            self._say()

    def stop(self) -> bool:
        """Stop the target's writing. False while `verify` must still take written tokens."""
        if self._text.is_writing:
            self._wait(self._stop())
        return not self._written

    def take_cost(self) -> LinkCost:
        """Time waited for verdicts, and bytes of all messages, since the last call."""
        before, self._taken = self._taken, self._text.spent
        rtt_ms, self._rtt_ms = self._rtt_ms, 0.0
        return replace(self._taken - before, rtt_ms=rtt_ms)

    def open_ahead(self) -> None:
        self._ahead = self._loop.begin(self._text.open(self._waiting))

    def go_alone(self, gone: CloudError) -> None:
        """Begin without a cloud that was not reached yet; it is asked again and again meanwhile."""
        self._wait(self._go_alone(gone))
        self._say()

    def close(self) -> None:
        """End the text at the server. Never waits, since a finalizer may call this."""
        if not self._is_closed:
            self._is_closed = True
            self._servers.end(self._end)

    async def _end(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
        others = [each.task for each in (self._waits.current, self._ahead) if each is not None]
        for task in (self._reading, *others):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait((task,))
        await self._text.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        began = time.perf_counter()
        try:
            return self._waits.begin(work).result()
        finally:
            self._rtt_ms += (time.perf_counter() - began) * 1e3

    def _say(self) -> None:
        while self._unsaid:
            self._notices.tell(self._unsaid.pop(0))

    async def _persist(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Try until there is an answer. After each failed try comes what may mend it, and a pause."""
        tries, began = None, self._loop.now()
        while True:
            try:
                if self._ahead is not None:
                    ahead, self._ahead = self._ahead, None
                    await ahead.task
                answer = await ask()
                if self._met is not self._server:  # it has just begun the text, or gone on with it
                    self._servers.met(self._server, self._text.target)
                    self._met = self._server
                return answer
            except SkydraftError as error:
                tries = tries or Situation(self._waiting.timeout_s, self._falls_back, began=began)
                await self._mend(error, tries)

    async def _mend(self, error: SkydraftError, tries: Situation) -> None:
        tries.tried.add(self._server.address)
        tries.faults[self._server.address] = error
        if isinstance(error, CloudLost):
            self._servers.lost(self._server)
        has_changed = isinstance(error, errors.TargetChanged) and self._servers.changed(self._server)
        if has_changed and not self._context.num_seen:
            self._text.target = self._met = None  # all servers of the list run another target now
            self._text.reopen()
            return
        others = [each for each in self._servers.in_order(self._key) if each.address not in tries.tried]
        now, tries.has_others = self._loop.now(), bool(others)
        tries.waited_s, tries.silent_s = now - tries.began, now - max(tries.began, self._server.heard_at)
        recovery = recover(error, tries)
        match recovery.step:
            case "give up" | "alone":
                await self._end_tries(error, recovery, tries)
            case "elsewhere":
                self._move(others[0])
            case "open again":
                self._text.reopen(renumber=isinstance(error, errors.SessionTaken))
            case "again" | "reconnect":
                tries.tried.clear()  # after a pause all servers may be tried again
        self._say_that_it_waits(error, tries)
        if recovery.step == "reconnect":
            await self._text.renew()
        tries.num_tries += 1
        tries.num_failures += isinstance(error, CloudFailure)
        tries.num_reopened += recovery.step == "open again"
        await asyncio.sleep(recovery.pause_s)

    def _move(self, server: Server) -> None:
        self._server = server
        self._text.reopen(server)

    def _say_that_it_waits(self, error: SkydraftError, tries: Situation) -> None:
        waits = tries.waited_s > SILENT_S and not tries.falls_back  # else it goes on alone in a moment
        if isinstance(error, CloudLost) and waits and not tries.is_told:
            tries.is_told = True
            self._notices.tell(f"{self._gone(error)}; waiting up to {self._waiting.timeout_s:g} s for it.")

    async def _end_tries(self, error: SkydraftError, recovery: Recovery, tries: Situation) -> NoReturn:
        if recovery.step == "give up":
            error = of_each(tries.faults)
            is_late = recovery.is_late and not isinstance(error, errors.RateLimited)  # which says until when
            raise too_late(self._servers.name, error, tries.waited_s) if is_late else error
        gone = error if isinstance(error, CloudError) else CloudFailure(str(error))
        await self._go_alone(gone, is_final=recovery.is_final)
        raise gone

    async def _go_alone(self, gone: CloudError, *, is_final: bool = False) -> None:
        self._outage = gone
        if isinstance(gone, CloudLost) and not is_final:
            self._servers.gone(gone)
        if is_said := self._notices.may_tell_outage(time.monotonic()):
            self._unsaid.append(f"{self._gone(gone)}; going on alone.")
        if not is_final and self._text.resumes:
            self._probing = asyncio.ensure_future(self._probe(gone, is_said=is_said))

    def _gone(self, error: CloudError) -> str:
        what = "is gone" if self._servers.is_reached else "was not reached"
        what = "is not ready" if isinstance(error, errors.CloudLoading) else what
        what = "may not be asked any more" if isinstance(error, errors.BudgetSpent) else what
        return f"The cloud at {self._servers.name} {what} ({error.line.rstrip('.')})"

    async def _probe(self, gone: CloudError, *, is_said: bool) -> None:
        # A server that answers, but fails, may answer the next ping at once and fail again.
        began, pause_s = time.monotonic(), _FIRST_PAUSE_S if isinstance(gone, CloudLost) else _LONGEST_PAUSE_S
        if isinstance(gone, errors.RateLimited):
            pause_s = max(pause_s, gone.retry_after_s)
        while self._outage is not None:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            for server in self._servers.in_order(self._key):
                try:
                    await server.ping(_PROBE_S)
                except SkydraftError:
                    await server.renew()
                    continue
                self._move(server)
                if is_said:
                    lost_s = time.monotonic() - began
                    self._unsaid.append(f"The cloud is back after {lost_s:.1f} s, and reads the text so far.")
                self._outage = None
                break

    async def _next(self, block: DraftBlock, catch_up: tuple[int, ...], write: int) -> Verdict:
        """The next token that the target wrote, or the verdict on a block: of one that is longer than the server
        accepts, on its first part."""
        while self._reading is not None:
            self._has_come.clear()
            if self._written:
                return self._written.popleft()
            if self._reading.done():
                reading, self._reading = self._reading, None
                reading.result()
            else:
                await self._has_come.wait()
        self.called = True
        verdict = await self._judge(block, catch_up, write)
        judged = block.first(self.max_block)
        self.came(block.base, verdict.commits(judged), 0)
        if self._text.is_writing:
            self._reading = asyncio.ensure_future(self._read_on())
            self._reading.add_done_callback(seen)
        return verdict

    async def _judge(self, block: DraftBlock, catch_up: tuple[int, ...], write: int) -> Verdict:
        try:
            return await self._text.verify(block.first(self.max_block), catch_up, write, self._waiting)
        except errors.LimitExceeded:
            facts = await self._servers.learn(self._server, self._waiting.timeout_s)
            if len(block.token_ids) <= facts.max_block:
                raise
            self.max_block = facts.max_block
            return await self._text.verify(block.first(self.max_block), catch_up, write, self._waiting)

    async def _read_on(self) -> None:
        """Read what the target writes until it stops, however slow the text's reader is."""
        try:
            while self._text.is_writing:
                for verdict in await self._text.next_written(self._waiting):
                    self._written.append(verdict)
                    self.came(verdict.base, verdict.commits(), verdict.num_accepted)
                self._has_come.set()
        finally:
            self._has_come.set()

    def draft(self, draft: Draft) -> None:
        """Send drafts beside what the target writes. Any thread may call this."""
        self._loop.post(lambda: self._text.draft(draft))

    async def _stop(self) -> None:
        """Read all tokens that the target has written. If that fails, the next verification reopens the session."""
        began = self._loop.now()
        self._text.stop()
        try:
            if self._reading is not None:
                await asyncio.wait((self._reading,), timeout=self._waiting.timeout_s)
                reading, self._reading = self._reading, None
                if not reading.done():
                    reading.cancel()
                    raise CloudFailure(f"The cloud at {self._server.address} goes on after it was stopped.")
                reading.result()
        except SkydraftError as error:
            self._text.break_off()
            if isinstance(error, CloudLost):  # noticed once: the text does not wait for a second sign of it
                with suppress(SkydraftError):
                    await self._mend(error, Situation(self._waiting.timeout_s, self._falls_back, began=began))


def too_late(name: str, error: SkydraftError, waited_s: float) -> CloudTimeout:
    hint = f"Run: skydraft doctor --cloud {name}. To wait longer: --cloud-timeout."
    return CloudTimeout(f"The cloud at {name} did not answer for {waited_s:.1f} s: {error.message}", hint=hint)
