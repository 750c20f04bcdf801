"""A text at one of several servers, on the event loop; and its verifier, which a generation's thread calls."""

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine
from collections.abc import Sequence as Seq
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NoReturn, TypeAlias

from skydraft import errors
from skydraft.decoding.context import Context
from skydraft.decoding.race.branch import Came
from skydraft.decoding.request import Prepared
from skydraft.edge.channel import Waiting, seen, shared_loop
from skydraft.edge.recovery import Recovery, Situation, recover
from skydraft.edge.server import Server
from skydraft.edge.servers import Servers, of_each
from skydraft.engines.vocab import Vocab
from skydraft.errors import Cancelled, CloudError, CloudFailure, CloudLost, CloudTimeout, SkydraftError
from skydraft.types import Draft, DraftBlock, LinkCost, Verdict

Answers: TypeAlias = SimpleQueue[Verdict | str | Exception | None]  # verdicts, lines for the user, then an end
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0  # between two probes of a lost cloud
_PROBE_S, SILENT_S = 3.0, 1.0  # timeout of a probe; a wait after which the user sees a line


class RemoteText:
    """One generation's text, with the committed tokens in `context`. It stays at one server until that is lost.

    All methods but `close` run on the event loop. One coroutine at a time sends requests and reads replies.
    """

    def __init__(
        self, servers: Servers, context: Context, vocab: Vocab, request: Prepared,
        waiting: Waiting, *, falls_back: bool,
    ) -> None:  # fmt: skip
        self.came: Came = lambda base, token_ids, num_accepted: None
        self._servers, self._context = servers, context
        self._waiting, self._falls_back = waiting, falls_back
        self._loop, self._key = shared_loop(), random.random()
        self._server = servers.in_order(self._key)[0]
        self._met: Server | None = None  # the server that has the text, once it has answered
        self.there = self._server.begin(context, vocab, request)
        self.there.target = servers.target
        self._answers = Answers()  # of the call under way
        self.lines = deque[str]()  # for the user; the generation's thread prints them
        self._work: asyncio.Task[None] | None = None  # the opening, or the last call
        # The error that ended the last reading, and the time of the request that it answered.
        self._fault: tuple[SkydraftError, float] | None = None
        self.outage: CloudError | None = None  # why the text continues without the cloud
        self._probing: asyncio.Task[None] | None = None

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._work = asyncio.ensure_future(work)
        self._work.add_done_callback(seen)

    async def open(self) -> None:
        began = self._loop.now()
        try:
            await self.there.open(self._waiting)
        except SkydraftError as error:
            self._fault = error, began

    def ask(self, answers: Answers, block: DraftBlock, catch_up: tuple[int, ...], write: int, since: float) -> None:
        """Put into `answers` the block's verdict, the verdicts on what the target writes next, then None or an error.

        The thread has waited since `since`. A CloudError means that the cloud is lost: for now if the text falls back,
        otherwise for good.
        """
        self._answers = answers
        self.begin(self._answer(self._work, answers, block, catch_up, write, since))

    async def _answer(
        self, before: asyncio.Task[None] | None, answers: Answers, block: DraftBlock, catch_up: tuple[int, ...],
        write: int, since: float,
    ) -> None:  # fmt: skip
        end: Exception | None = None
        try:
            if before is not None:
                await before  # cancelling this task cancels it too
            verdict = await self._persist(block, catch_up, write, since)
            answers.put(verdict)
            self.came(block.base, verdict.commits(block), 0)
            await self._read_on(answers)
        except Exception as error:
            end = error
        except asyncio.CancelledError:
            end = Cancelled("The generation was cancelled.")
        if not self._loop.is_over:  # else the interpreter is ending, and the thread ends with it
            answers.put(end)

    def cancel(self) -> None:
        """End the call under way with Cancelled."""
        if self._work is not None:
            self._work.cancel()

    def close(self) -> None:
        """End the text at the server. Never waits; any thread may call this."""
        self._servers.end(self._end)

    async def _end(self) -> None:
        for task in (self._probing, self._work):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait((task,))
        await self.there.close()

    async def _persist(self, block: DraftBlock, catch_up: tuple[int, ...], write: int, since: float) -> Verdict:
        """Retry until there is an answer, with a remedy and a pause after each failure."""
        error, began = self._fault or (None, since)
        self._fault = None
        tries: Situation | None = None
        while True:
            if error is not None:
                tries = tries or Situation(self._waiting.timeout_s, self._falls_back, began=max(began, since))
                await self._mend(error, tries)
            try:
                verdict = await self.there.verify(block, catch_up, write, self._waiting)
            except SkydraftError as failed:
                error = failed
                continue
            if self._met is not self._server:  # the text has just started here, or moved here
                self._servers.met(self._server, self.there.target)
                self._met = self._server
            return verdict

    async def _read_on(self, answers: Answers) -> None:
        """Read what the target writes until it stops, however slow the text's consumer is. Keep an error for the next
        call, which recovers from it at once."""
        began = self._loop.now()
        try:
            while self.there.is_writing:
                began = self._loop.now()
                if verdict := await self.there.next_written(self._waiting):
                    answers.put(verdict)
                    self.came(verdict.base, verdict.commits(), verdict.num_accepted)
        except SkydraftError as error:
            self._fault = error, began
            self.there.break_off()

    async def _mend(self, error: SkydraftError, tries: Situation) -> None:
        tries.faults[self._server.address] = error
        if isinstance(error, CloudLost | errors.TargetChanged):
            self._servers.lost(self._server)
        others = [each for each in self._servers.in_order(self._key) if each.address not in tries.faults]
        if self._servers.have_changed(tries.faults) and not self._context.num_seen:
            self.there.target = self._met = None
            self.there.reopen()
            return
        now, tries.has_others = self._loop.now(), bool(others)
        tries.waited_s, tries.silent_s = now - tries.began, now - max(tries.began, self._server.heard_at)
        recovery = recover(error, tries)
        match recovery.step:
            case "give up" | "alone":
                await self._end_tries(error, recovery, tries)
            case "elsewhere":
                self._move(others[0])
            case "open again":
                self.there.reopen(renumber=isinstance(error, errors.SessionTaken))
            case "again" | "reconnect":
                tries.faults.clear()  # after a pause all servers may be tried again
        self._say_that_it_waits(error, tries)
        if recovery.step == "reconnect":
            await self.there.renew()
        tries.num_tries += 1
        tries.num_failures += isinstance(error, CloudFailure)
        await asyncio.sleep(recovery.pause_s)

    def _move(self, server: Server) -> None:
        self._server = server
        self.there.reopen(server)

    def _say_that_it_waits(self, error: SkydraftError, tries: Situation) -> None:
        waits = tries.waited_s > SILENT_S and not tries.falls_back  # else it falls back in a moment
        if isinstance(error, CloudLost) and waits and not tries.is_told:
            tries.is_told = True
            self._answers.put(f"{self._gone(error)}; waiting up to {self._waiting.timeout_s:g} s for it.")

    async def _end_tries(self, error: SkydraftError, recovery: Recovery, tries: Situation) -> NoReturn:
        if recovery.step == "give up":
            error = of_each(tries.faults)
            is_late = recovery.is_late and not isinstance(error, errors.RateLimited)  # that error has its own time
            raise too_late(self._servers.name, error, tries.waited_s) if is_late else error
        gone = error if isinstance(error, CloudError) else CloudFailure(str(error))
        await self.go_alone(gone, is_final=recovery.is_final)
        raise gone

    async def go_alone(self, gone: CloudError, *, is_final: bool = False) -> None:
        """Continue without a cloud that is lost or not reached yet. Probe it in the background, unless `is_final`."""
        self.outage = gone
        if is_said := self._servers.outage is None:  # else another text has told the user
            self.lines.append(f"{self._gone(gone)}; going on without it.")
        if isinstance(gone, CloudLost) and not is_final:
            self._servers.gone(gone)
        if not is_final and self.there.resumes:
            self._probing = asyncio.ensure_future(self._probe(gone, is_said=is_said))

    def _gone(self, error: CloudError) -> str:
        what = "was lost" if self._servers.is_reached else "was not reached"
        what = what if isinstance(error, CloudLost) else "cannot be used"
        return f"The cloud at {self._servers.name} {what} ({error.line.rstrip('.')})"

    async def _probe(self, gone: CloudError, *, is_said: bool) -> None:
        # A server that answers but fails would also answer the next ping, and fail again.
        began, pause_s = time.monotonic(), _FIRST_PAUSE_S if isinstance(gone, CloudLost) else _LONGEST_PAUSE_S
        if isinstance(gone, errors.RateLimited):
            pause_s = max(pause_s, gone.retry_after_s)
        while self.outage is not None:
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
                    self.lines.append(f"The cloud is back after {lost_s:.1f} s and reads the text so far.")
                self.outage = None
                break


def too_late(name: str, error: SkydraftError, waited_s: float) -> CloudTimeout:
    hint = f"Run: skydraft doctor --cloud {name}. To wait longer: --cloud-timeout."
    return CloudTimeout(f"The cloud at {name} did not answer for {waited_s:.1f} s: {error.message}", hint=hint)


Notify = Callable[[str], None]


def silent(line: str) -> None: ...


def waiting_for(timeout_s: float, *, falls_back: bool, has_others: bool) -> Waiting:
    """Return how long a text waits for one answer."""
    quick_s = 0.3 if falls_back else 2.0
    ping_s = (0.3 if has_others else 0.5) if falls_back else (2.0 if has_others else 5.0)
    return Waiting(timeout_s, min(quick_s, timeout_s), min(ping_s, timeout_s))


class RemoteVerifier:
    """`Verifier` of a text at one of several servers. One thread at a time blocks in it, and passes lines for the user
    to `notify`."""

    def __init__(self, text: RemoteText, notify: Notify) -> None:
        self.called = self._is_closed = self._is_cancelled = False
        self._text, self.sent, self._notify, self._loop = text, text.there.sent, notify, shared_loop()
        self._answers: Answers | None = None  # of a call that has not ended
        self._written = deque[Verdict]()  # verdicts that came before the target stopped
        self._rtt_ms = 0.0
        self._taken = LinkCost()  # the part of the text's cost that `take_cost` has returned

    @property
    def link(self) -> LinkCost:
        return self._text.there.spent

    def hear(self, came: Came) -> None:
        """Call `came` on the event loop for each verdict, possibly before this thread takes it."""
        self._text.came = came

    def verify(self, block: DraftBlock, catch_up: Seq[int], write: int = 0) -> Verdict:
        """Return the cloud's verdict. Raises CloudError if the cloud is lost: for now if the text falls back, otherwise
        for good."""
        self.called = False
        self._loop.check_process()
        if self._written:
            return self._written.popleft()
        self._say()
        if self._answers is not None and (verdict := self._next(self._answers)):
            return verdict
        if (gone := self._text.outage) is not None:
            raise gone.with_traceback(None)  # else its traceback would keep each round alive
        self.called, self._answers = True, (answers := Answers())
        since = self._loop.now() - self._rtt_ms / 1e3  # counts the wait alone, not a slow consumer's time
        self._loop.call(lambda: self._ask(answers, block, tuple(catch_up), write, since))
        try:
            verdict = self._next(answers)
        finally:
            self._say()
        assert verdict is not None
        return verdict

    def _ask(
        self, answers: Answers, block: DraftBlock, catch_up: tuple[int, ...], write: int, since: float
    ) -> None:  # fmt: skip
        if self._is_cancelled:  # a task that is cancelled before it begins would put nothing
            answers.put(Cancelled("The generation was cancelled."))
        else:
            self._text.ask(answers, block, catch_up, write, since)

    def _say(self) -> None:
        while self._text.lines:
            self._notify(self._text.lines.popleft())

    def _next(self, answers: Answers) -> Verdict | None:
        """Return the next verdict, None at the end of the call."""
        if self._is_cancelled:
            raise Cancelled("The generation was cancelled.")
        began = time.perf_counter()
        try:
            while isinstance(answer := answers.get(), str):
                self._notify(answer)
        except BaseException:
            self._answers = None
            self._loop.post(self._text.cancel)
            raise
        finally:
            self._rtt_ms += (time.perf_counter() - began) * 1e3
        if isinstance(answer, Verdict):
            return answer
        self._answers = None
        if answer is not None:
            raise answer
        return None

    def draft(self, draft: Draft) -> None:
        """Send drafts while the target writes. Any thread may call this."""
        self._loop.post(lambda: self._text.there.draft(draft))

    def stop(self) -> bool:
        """Stop the target's writing. Return False while written tokens are left for `verify`."""
        if self._answers is not None:
            self._loop.check_process()
            self._loop.post(self._text.there.stop)
            while self._answers is not None and (verdict := self._next(self._answers)):
                self._written.append(verdict)
        return not self._written

    def take_cost(self) -> LinkCost:
        """Return the costs since the last call; `rtt_ms` is the time waited for verdicts."""
        before, self._taken = self._taken, self.link
        rtt_ms, self._rtt_ms = self._rtt_ms, 0.0
        return replace(self._taken - before, rtt_ms=rtt_ms)

    def open_ahead(self) -> None:
        self._loop.call(lambda: self._text.begin(self._text.open()))

    def go_alone(self, gone: CloudError) -> None:
        """Start without a cloud that was not reached yet."""
        self._loop.begin(self._text.go_alone(gone)).result()  # before the text's first request
        self._say()

    def cancel(self) -> None:
        """End this wait and all later ones with Cancelled. Any thread may call this."""
        self._is_cancelled = True
        self._loop.post(self._text.cancel)

    def close(self) -> None:
        """End the text at the server. Never waits: a finalizer may call this."""
        if not self._is_closed:
            self._is_closed = True
            self._text.close()
