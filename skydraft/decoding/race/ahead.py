"""Drafting ahead of a text that the target writes, in its own thread, so that neither model waits."""

import itertools
import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from skydraft.decoding.context import Context, Text
from skydraft.decoding.drafting import Drafter, Step
from skydraft.decoding.race.branch import MAX_AHEAD, MAX_KEPT, Worth
from skydraft.decoding.race.copying import Copies
from skydraft.decoding.turns import run_of
from skydraft.types import Cost, Draft, DraftBlock, Prompt

_WINDOW, _LEAST = 32, 5  # of the last 32 tokens that had a draft, 5 drafts must be accepted
_FIRST_RUN, _LONGEST_RUN, _LONGER = 3, 64, 1.5  # agreements in a row before an idle device drafts again
_NUM_READ, _LOOK_S = 16, 0.1  # tokens that an idle device reads at once; seconds between checks for `close`
_Send = Callable[[Draft], None]


class Pace:
    """Decides whether drafting pays, from tokens alone, so that it needs no clock.

    Drafting pays until few of the last tokens were accepted drafts. Then the draft model only reads the target's
    tokens. It drafts again after some agreements in a row, more after each failed try, and never if the target is
    faster.
    """

    def __init__(self) -> None:
        self.is_idle = False
        self._came = deque[bool](maxlen=_WINDOW)
        self._run, self._needed, self._num_late = 0, float(_FIRST_RUN), 0

    @property
    def is_slow(self) -> bool:
        """Whether the target is faster: its token arrived before the draft, `_WINDOW` times in a row."""
        return self._num_late >= _WINDOW

    def drafted(self, *, in_time: bool) -> None:
        self._num_late = 0 if in_time else self._num_late + 1
        self.is_idle = self.is_idle or self.is_slow

    def came(self, is_accepted: bool) -> None:
        """Record a token that had a draft."""
        if self.is_idle:
            return
        self._came.append(is_accepted)
        if len(self._came) < _WINDOW:
            return
        if sum(self._came) >= _LEAST:
            self._needed = _FIRST_RUN
        else:
            self.is_idle, self._run = True, 0
            self._came.clear()

    def read(self, agrees: Seq[bool | None]) -> None:
        self._run = run_of(agrees, self._run)
        if self._run >= self._needed:
            self.is_idle, self._needed = False, min(self._needed * _LONGER, _LONGEST_RUN)


class Ahead(Text):
    """The draft model's side of a text while the target writes it. `send` gets the drafts.

    Its thread drafts after the tokens received and its own drafts, at most `MAX_AHEAD` tokens beyond the text. If the
    target's tokens differ from the drafts or go past them, a new branch begins. `copies` need no step of the model.
    They are used while they are right as often as its own drafts, or without a `drafter`.
    """

    def __init__(self, drafter: Drafter | None, prompt: Prompt, send: _Send, copies: Copies | None = None) -> None:
        super().__init__(prompt.token_ids)  # tokens received so far
        self._drafter, self._send, self._copies = drafter, send, copies
        self._changed = threading.Condition()  # guards all state
        self._branch, self._begin, self._drafts = 1, 0, list[Step]()  # number, place and drafts of the branch
        self._past = deque[tuple[int, list[Step]]](maxlen=MAX_KEPT)  # older branches
        self._agrees: dict[int, bool | None] = {}  # by place: does the draft model agree? None: the token was forced
        self._num_told = 0  # tokens before it were reported in `read`, or not written by the target
        self._is_ended = False  # the drafts end the text, or fill the draft model's context
        self._num_read = self._num_searched = -1  # tokens read by the draft model; tokens searched for copies
        self._worth = Worth()  # of the draft model's own drafts
        self._pace, self._cost = Pace(), Cost()
        self._may_draft = self._is_busy = self._is_closed = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        if drafter is not None:
            drafter.compares = self._agrees.__setitem__

    def go(self, context: Context) -> DraftBlock:
        """Continue drafting after `context` and later tokens. Returns an empty block with the cost and agreements since
        the last call. Raises the error that ended the thread."""
        with self._changed:
            if self._error:
                raise self._error
            for token_id in context.generated[self.base :].tolist():
                self._append(token_id)
            if not self._may_draft:
                self._may_draft, self._num_told = True, context.base
            self._changed.notify_all()
            cost, self._cost = self._cost, Cost()
            first = self._num_told
            while self._num_told in self._agrees and self._num_told < context.base:
                self._num_told += 1
            agrees = tuple(self._agrees[place] for place in range(first, self._num_told))
            block = DraftBlock(context.base, (), cost=cost, read=agrees, num_unread=context.base - self._num_told)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="skydraft drafts", daemon=True)
            self._thread.start()
        return block

    def came(self, base: int, token_ids: Seq[int], num_accepted: int) -> None:
        """Record tokens that the target wrote after `base` tokens; the first `num_accepted` were drafts."""
        with self._changed:
            if base > self.base:
                return  # earlier tokens were written on this device, and `go` brings them
            for index in range(self.base - base, len(token_ids)):
                if self._drafts_ahead:
                    self._pace.came(index < num_accepted)
                self._append(token_ids[index])
            self._changed.notify_all()

    def _append(self, token_id: int) -> None:
        draft = next(iter(self._drafts_ahead), None)
        if draft is not None and draft.is_copied and self._copies:
            self._copies.observe(int(draft.token_id == token_id), 1)
        elif draft is not None:
            self._agrees[self.base] = None if draft.is_forced else draft.token_id == token_id
            self._worth.note(draft.token_id == token_id)
        self._add([token_id])
        if draft is None or draft.token_id != token_id:
            self._begin_branch()

    @property
    def _drafts_ahead(self) -> list[Step]:
        """The drafts beyond the tokens received."""
        return self._drafts[self.base - self._begin :]

    def _begin_branch(self) -> None:
        if self._drafts:
            self._branch += 1
            self._past.append((self._begin, self._drafts))
        self._begin, self._drafts, self._is_ended = self.base, [], False

    def judged(self, base: int, token_ids: tuple[int, ...]) -> DraftBlock:
        """Return the block of drafts that the target has judged."""
        with self._changed:
            branches = [*self._past, (self._begin, self._drafts)]
        parts = (drafts[base - begin :][: len(token_ids)] for begin, drafts in reversed(branches) if begin <= base)
        steps = next((part for part in parts if tuple(each.token_id for each in part) == token_ids), ())
        forced = tuple(each.is_forced for each in steps)
        is_copied = any(each.is_copied for each in steps)
        return DraftBlock(base, token_ids, forced=forced if any(forced) else (), is_copied=is_copied)

    def pause(self, base: int) -> list[Step]:
        """Stop drafting until `go`; returns the model's own drafts after `base` tokens, if the text ends there."""
        with self._changed:
            self._may_draft = False
            self._changed.wait_for(lambda: not self._is_busy)
            ahead = self._drafts_ahead if self.base == base else []
            self._begin_branch()
            return [*itertools.takewhile(lambda each: not each.is_copied, ahead)]

    def close(self) -> None:
        """Stop drafting for good, without waiting."""
        self._is_closed = True

    def _run(self) -> None:
        try:
            if self._copies is not None:
                self._copies.draft(self.token_ids)  # index the prompt without the lock, so that `came` need not wait
            while self._work():
                pass
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def _work(self) -> bool:
        """Wait for work, then draft or read once; returns False when closed."""
        with self._changed:
            while not self._is_closed and not (self._may_draft and self._has_work()):
                self._changed.wait(_LOOK_S)
            if self._is_closed:
                return False
            branch, reads, self._is_busy = (self._branch, self._begin, len(self._drafts)), self._pace.is_idle, True
            ahead = [] if reads else [each.token_id for each in self._drafts_ahead]
            text = np.concatenate((self.token_ids, np.array(ahead, np.int32)))
        assert self._drafter is not None  # else `_has_work` is False
        read: tuple[bool | None, ...] = ()
        steps = list[Step]()
        if reads:
            read, cost = (block := self._drafter.read(text)).read, block.cost
        else:
            steps, _, cost = self._drafter.steps(text, 1)
        with self._changed:
            self._is_busy, self._cost = False, self._cost + cost
            if read or not reads or not cost.num_passes:  # otherwise more tokens are unread
                self._num_read = len(text)
            if reads:
                self._pace.read(read)
            elif branch == (self._branch, self._begin, len(self._drafts)):
                self._offer(steps)
                self._is_ended = not steps or steps[-1].finish is not None
                self._pace.drafted(in_time=True)
            elif steps and np.array_equal(self.token_ids[: len(text)], text):
                own, written = steps[0], int(self.token_ids[len(text)])
                place = len(text) - self._prompt_len
                self._agrees.setdefault(place, None if own.is_forced else own.token_id == written)
                self._pace.drafted(in_time=False)
            self._changed.notify_all()
        return True

    def _has_work(self) -> bool:
        if self._copies is not None and self._num_searched < self.base:
            self._copy(self._copies)
        num_known, num_ahead = self.length, len(self._drafts_ahead)
        if self._drafter is None or self._is_ended or not self._drafter.room(num_known + num_ahead):
            return False
        if self._pace.is_idle:
            return not self._pace.is_slow and num_known - self._num_read >= _NUM_READ
        return num_ahead < MAX_AHEAD

    def _copy(self, copies: Copies) -> None:
        self._num_searched = self.base
        found = copies.draft(self.token_ids)
        if self._drafter is not None and copies.share < self._worth.share:
            return
        ahead = tuple(each.token_id for each in self._drafts_ahead)
        if len(found) > len(ahead) and found[: len(ahead)] == ahead:
            self._offer([Step(token_id, is_copied=True) for token_id in found[len(ahead) :]])

    def _offer(self, drafts: list[Step]) -> None:
        if drafts:
            place = self._begin + len(self._drafts)
            self._drafts += drafts
            self._send(Draft(self._branch, place, tuple(each.token_id for each in drafts)))
