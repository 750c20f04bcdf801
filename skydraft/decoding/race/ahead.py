"""Drafting ahead of a text that the target writes: in a thread of its own, so that neither waits for the other."""

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

_WINDOW, _LEAST = 32, 5  # of so many tokens that came and had a draft, so many have to be accepted ones
_FIRST_RUN, _LONGEST_RUN, _LONGER = 3, 64, 1.5  # agreements after which an idle device drafts again
_NUM_READ, _LOOK_S = 16, 0.1  # tokens that an idle device reads at once; of whether it is closed
_Send = Callable[[Draft], None]


class Pace:
    """Whether drafting pays: by tokens alone, so that it needs no clock.

    It pays until few of the last tokens were accepted drafts. Then the draft model reads along, and drafts again once
    it agrees with some tokens in a row: with more after each try that was in vain, and never if the target is faster.
    """

    def __init__(self) -> None:
        self.is_idle = False
        self._came = deque[bool](maxlen=_WINDOW)
        self._run, self._needed, self._num_late = 0, float(_FIRST_RUN), 0

    @property
    def is_slow(self) -> bool:
        """Whether the target is faster: one step after another was over when its token had come."""
        return self._num_late >= _WINDOW

    def drafted(self, *, in_time: bool) -> None:
        self._num_late = 0 if in_time else self._num_late + 1
        self.is_idle = self.is_idle or self.is_slow

    def came(self, is_accepted: bool) -> None:
        """A token came, for which there was a draft."""
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

    Its thread drafts after what has come of the text and what it has drafted since, `MAX_AHEAD` tokens beyond the text
    at most. What comes may differ from the drafts or go past them; then a new branch begins. `copies` are drafts that
    need no step of the model. They are used while they are right as often as its own, or without a `drafter`.
    """

    def __init__(self, drafter: Drafter | None, prompt: Prompt, send: _Send, copies: Copies | None = None) -> None:
        super().__init__(prompt.token_ids)  # what has come
        self._drafter, self._send, self._copies = drafter, send, copies
        self._changed = threading.Condition()  # guards all that changes
        self._branch, self._begin, self._drafts = 1, 0, list[Step]()  # which follow so many tokens
        self._past = deque[tuple[int, list[Step]]](maxlen=MAX_KEPT)  # older branches
        self._agrees: dict[int, bool | None] = {}  # by place: would the draft model have written it? None: it had to
        self._num_told = 0  # tokens of which that is known to the caller, or that the target did not write
        self._is_ended = False  # the drafts end the text, or fill the draft model's context
        self._num_read = self._num_searched = -1  # how far the draft model has read, and the copies have
        self._worth = Worth()  # of the draft model's own drafts
        self._pace, self._cost = Pace(), Cost()
        self._may_draft = self._is_busy = self._is_closed = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        if drafter is not None:
            drafter.compares = self._agrees.__setitem__

    def go(self, context: Context) -> DraftBlock:
        """Draft on after `context` and what has come since. Returns an empty block with what drafting has cost since
        the last call, and what has been read. Raises what ended the thread."""
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
        """Take in what the target wrote after `base` tokens; its first `num_accepted` were drafts."""
        with self._changed:
            if base > self.base:
                return  # tokens before these were written here, and come with `go`
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
        self._tokens.extend([token_id])
        if draft is None or draft.token_id != token_id:
            self._begin_branch()

    @property
    def _drafts_ahead(self) -> list[Step]:
        """The drafts after what has come."""
        return self._drafts[self.base - self._begin :]

    def _begin_branch(self) -> None:
        if self._drafts:
            self._branch += 1
            self._past.append((self._begin, self._drafts))
        self._begin, self._drafts, self._is_ended = self.base, [], False

    def judged(self, base: int, token_ids: tuple[int, ...]) -> DraftBlock:
        """The block of drafts that the target has judged."""
        with self._changed:
            branches = [*self._past, (self._begin, self._drafts)]
        parts = (drafts[base - begin :][: len(token_ids)] for begin, drafts in reversed(branches) if begin <= base)
        steps = next((part for part in parts if tuple(each.token_id for each in part) == token_ids), ())
        forced = tuple(each.is_forced for each in steps)
        is_copied = any(each.is_copied for each in steps)
        return DraftBlock(base, token_ids, forced=forced if any(forced) else (), is_copied=is_copied)

    def pause(self, base: int) -> list[Step]:
        """Draft no more until `go`; returns the draft model's own drafts after `base` tokens, if these have come."""
        with self._changed:
            self._may_draft = False
            self._changed.wait_for(lambda: not self._is_busy)
            ahead = self._drafts_ahead if self.base == base else []
            self._begin_branch()
            return [*itertools.takewhile(lambda each: not each.is_copied, ahead)]

    def close(self) -> None:
        """Draft no more. Never waits."""
        self._is_closed = True

    def _run(self) -> None:
        try:
            if self._copies is not None:
                self._copies.draft(self.token_ids)  # reads the prompt, while `came` need not wait
            while self._work():
                pass
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def _work(self) -> bool:
        """Draft or read once, when there is something to do; False at the end."""
        with self._changed:
            while not self._is_closed and not (self._may_draft and self._has_work()):
                self._changed.wait(_LOOK_S)
            if self._is_closed:
                return False
            branch, reads, self._is_busy = (self._branch, self._begin, len(self._drafts)), self._pace.is_idle, True
            ahead = [] if reads else [each.token_id for each in self._drafts_ahead]
            text = np.concatenate((self.token_ids, np.array(ahead, np.int32)))
        assert self._drafter is not None  # there was work for it
        read: tuple[bool | None, ...] = ()
        steps = list[Step]()
        if reads:
            read, cost = (block := self._drafter.read(text)).read, block.cost
        else:
            steps, _, cost = self._drafter.steps(text, 1)
        with self._changed:
            self._is_busy, self._cost = False, self._cost + cost
            if read or not reads or not cost.num_passes:  # else there is more to read
                self._num_read = len(text)
            if reads:
                self._pace.read(read)
            elif branch == (self._branch, self._begin, len(self._drafts)):
                self._add(steps)
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
        num_known, num_ahead = len(self.token_ids), len(self._drafts_ahead)
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
            self._add([Step(token_id, is_copied=True) for token_id in found[len(ahead) :]])

    def _add(self, drafts: list[Step]) -> None:
        if drafts:
            place = self._begin + len(self._drafts)
            self._drafts += drafts
            self._send(Draft(self._branch, place, tuple(each.token_id for each in drafts)))
