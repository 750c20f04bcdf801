"""The verifier at the other end of a link: one thread's calls of a text that the event loop owns."""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

from skydraft.decoding.branch import Came
from skydraft.edge.channel import Waiting, shared_loop
from skydraft.edge.text import Answers, RemoteText
from skydraft.errors import Cancelled, CloudError
from skydraft.types import Draft, DraftBlock, LinkCost, Verdict

Notify = Callable[[str], None]


def silent(line: str) -> None: ...


def waiting_for(timeout_s: float, *, falls_back: bool, has_others: bool) -> Waiting:
    """How long a text waits for one answer."""
    quick_s = 0.3 if falls_back else 2.0
    ping_s = (0.3 if has_others else 0.5) if falls_back else (2.0 if has_others else 5.0)
    return Waiting(timeout_s, min(quick_s, timeout_s), min(ping_s, timeout_s))


class RemoteVerifier:
    """`Verifier` of a text at one of several servers. It blocks one thread at a time, which calls `notify` with lines
    for the user."""

    def __init__(self, text: RemoteText, notify: Notify) -> None:
        self.called = self._is_closed = self._is_cancelled = False
        self._text, self.sent, self._notify, self._loop = text, text.there.sent, notify, shared_loop()
        self._answers: Answers | None = None  # of a call that has not ended
        self._written = deque[Verdict]()  # what came of it until the target stopped
        self._rtt_ms = 0.0
        self._taken = LinkCost()  # the part of the text's cost that `take_cost` has returned

    @property
    def link(self) -> LinkCost:
        return self._text.there.spent

    @property
    def max_block(self) -> int | None:
        return self._text.max_block

    def hear(self, came: Came) -> None:
        """Let the event loop call `came` for each verdict, before this thread has it."""
        self._text.came = came

    def verify(self, block: DraftBlock, catch_up: Seq[int], write: int = 0) -> Verdict:
        """The cloud's verdict. Raises CloudError if the cloud is lost for good, or for now if the text falls back."""
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
        since = self._loop.now() - self._rtt_ms / 1e3  # a reader may have taken its time since the last round
        self._loop.call(lambda: self._ask(answers, block, tuple(catch_up), write, since))
        try:
            verdict = self._next(answers)
        finally:
            self._say()
        assert verdict is not None
        return verdict

    def _say(self) -> None:
        while self._text.lines:
            self._notify(self._text.lines.popleft())

    def _ask(
        self, answers: Answers, block: DraftBlock, catch_up: tuple[int, ...], write: int, since: float
    ) -> None:  # fmt: skip
        if self._is_cancelled:
            answers.put(Cancelled("The generation was cancelled."))
        else:
            self._text.ask(answers, block, catch_up, write, since)

    def _next(self, answers: Answers) -> Verdict | None:
        """The next verdict, None at the end of the call."""
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
        """Send drafts beside what the target writes. Any thread may call this."""
        self._loop.post(lambda: self._text.draft(draft))

    def stop(self) -> bool:
        """Stop the target's writing. False while `verify` must still take written tokens."""
        if self._answers is not None:
            self._loop.check_process()
            self._loop.post(self._text.stop)
            while self._answers is not None and (verdict := self._next(self._answers)):
                self._written.append(verdict)
        return not self._written

    def take_cost(self) -> LinkCost:
        """Time waited for verdicts, and bytes of all messages, since the last call."""
        before, self._taken = self._taken, self.link
        rtt_ms, self._rtt_ms = self._rtt_ms, 0.0
        return replace(self._taken - before, rtt_ms=rtt_ms)

    def open_ahead(self) -> None:
        self._loop.call(lambda: self._text.begin(self._text.open()))

    def go_alone(self, gone: CloudError) -> None:
        """Begin without a cloud that was not reached yet."""
        self._loop.begin(self._text.go_alone(gone)).result()  # before the text asks
        self._say()

    def cancel(self) -> None:
        """End a wait and all later ones with Cancelled. Any thread may call this."""
        self._is_cancelled = True
        self._loop.post(self._text.cancel)

    def close(self) -> None:
        """End the text at the server. Never waits, since a finalizer may call this."""
        if not self._is_closed:
            self._is_closed = True
            self._text.close()
