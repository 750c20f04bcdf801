"""The pooler's logic in vLLM's worker process: hidden states in, verdicts out. It imports nothing of vLLM.

A request's rows may come in several calls, and some may come twice after vLLM restarted the request. So rows are kept
by position until the request is complete. Then lm_head is applied to the needed rows, and our Chooser decides, with
the same code as for every other engine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

from skydraft.choosing.chooser import Chooser
from skydraft.choosing.stopping import Stopping
from skydraft.cloud.vllm.asking import ROWS_MISSING, UNKNOWN_CHOOSER, Asking, error_answer, read_params, verdict_answer
from skydraft.config import DecodingParams
from skydraft.decoding.verification import Verification, absorb_all
from skydraft.engines.rows import Rows
from skydraft.engines.vocab import TokenIds, Vocab
from skydraft.types import Cost, DraftBlock

_MAX_ROWS = 256  # of logits at a time: 256 rows of 151,936 float32 are 156 MB, which vLLM's memory plan does not know
_MAX_CHOOSERS = 4096
_READ = b"{}"  # the answer to a request that only reads a text


class States(Protocol):
    """Storage that vLLM keeps for the life of a request."""


@dataclass(frozen=True, slots=True)
class Computed:
    """The output of one forward for a request: `hidden` [num_rows, hidden] from the absolute row `first_row` on.

    `asked` is the `extra_kwargs` of the request; None for the engine's own warm-up requests.
    """

    asked: Mapping[str, Any] | None
    token_ids: TokenIds
    first_row: int
    hidden: Rows
    states: States
    is_last: bool


@dataclass(slots=True)
class _Open:
    """A complete request; `index` is its position in the call."""

    index: int
    work: Verification
    pieces: list[Rows]


class BlockPooler:
    """Judges the blocks of one engine. `logits` maps hidden states [n, hidden] to rows [n, at least vocab.size]."""

    def __init__(self, vocab: Vocab, logits: Callable[[Seq[Rows]], list[Rows]]) -> None:
        self._vocab = vocab
        self._logits = logits
        self._choosers: OrderedDict[str, tuple[Chooser, DecodingParams]] = OrderedDict()

    def pool(self, parts: Seq[Computed]) -> list[bytes | None]:
        """An answer for each complete request, None for the others. Never raises: an error is an answer too."""
        answers: list[bytes | None] = [None] * len(parts)
        requests = []
        for index, part in enumerate(parts):
            try:
                given = self._take(index, part)
            except Exception as error:
                given = error_answer(error)
            if isinstance(given, _Open):
                requests.append(given)
            else:
                answers[index] = given
        try:
            self._judge(requests, answers)
        except Exception as error:  # a failed forward of lm_head fails all requests of the call
            for work in requests:
                answers[work.index] = answers[work.index] or error_answer(error)
        return answers

    def _take(self, index: int, part: Computed) -> _Open | bytes | None:
        """Keep the rows of a part; returns an answer if the request needs no judging or cannot be judged."""
        if not part.asked:
            return _READ if part.is_last else None
        asking = Asking.read(part.asked)
        start = asking.seen_len - 1
        kept = _kept(part.states)
        if part.first_row + len(part.hidden) > start:
            rows = part.hidden[max(start - part.first_row, 0) :]
            first_row = max(start, part.first_row)
            kept[first_row] = rows if part.is_last else deepcopy(rows)  # the next forward writes over it
        if not part.is_last:
            return None
        pieces = _from(kept, start, len(part.token_ids))
        kept.clear()
        if pieces is None:
            return ROWS_MISSING
        chooser = self._chooser(asking)
        return chooser if isinstance(chooser, bytes) else _Open(index, self._work(asking, part, *chooser), pieces)

    def _chooser(self, asking: Asking) -> tuple[Chooser, DecodingParams] | bytes:
        """The chooser of a session; a new one is made from its parameters."""
        known = self._choosers.pop(asking.chooser, None)
        if known is None:
            if not asking.params:
                return UNKNOWN_CHOOSER
            params = read_params(asking.params)
            known = Chooser(params, self._vocab, asking.prompt_len), params
        self._choosers[asking.chooser] = known
        while len(self._choosers) > _MAX_CHOOSERS:
            self._choosers.popitem(last=False)
        return known

    def _work(self, asking: Asking, part: Computed, chooser: Chooser, params: DecodingParams) -> Verification:
        seen, rest = part.token_ids[: asking.seen_len], [int(each) for each in part.token_ids[asking.seen_len :]]
        catch_up, draft = rest[: asking.num_catch_up], tuple(rest[asking.num_catch_up :])
        block = DraftBlock(asking.seen_len - asking.prompt_len + len(catch_up), draft)
        stopping = Stopping(params, self._vocab, asking.max_new_tokens)
        start = asking.seen_len - 1
        return Verification(seen, asking.prompt_len, catch_up, block, start, chooser, stopping, asking.top)

    def _judge(self, requests: list[_Open], answers: list[bytes | None]) -> None:
        """Answer each request, in batches of at most `_MAX_ROWS` rows of logits."""
        while requests := [one for one in requests if answers[one.index] is None]:
            batch, rows = _batch(requests)
            logits = [each[:, : self._vocab.size] for each in self._logits(rows)]  # beyond it is padding
            errors = absorb_all([(one.work, each) for one, each in zip(batch, logits, strict=True)])
            for one, error in zip(batch, errors, strict=True):
                if error:
                    answers[one.index] = error_answer(error)
                elif one.work.next_feed(1) is None:
                    answers[one.index] = verdict_answer(one.work.verdict(Cost()))


def _batch(requests: list[_Open]) -> tuple[list[_Open], list[Rows]]:
    """The next rows of as many requests as fit in a batch."""
    batch: list[_Open] = []
    rows: list[Rows] = []
    room = _MAX_ROWS
    for one in requests:
        if room > 0:
            piece = one.pieces[0]
            one.pieces[:1] = [piece[room:]] if len(piece) > room else []
            batch.append(one)
            rows.append(piece[:room])
            room -= len(rows[-1])
    return batch, rows


def _kept(states: Any) -> dict[int, Rows]:
    """The kept rows of a request, by position."""
    if not hasattr(states, "skydraft_rows"):
        states.skydraft_rows = {}
    kept: dict[int, Rows] = states.skydraft_rows
    return kept


def _from(kept: dict[int, Rows], start: int, end: int) -> list[Rows] | None:
    """The rows from `start` to `end`, in pieces; None if one is missing."""
    pieces = []
    at = start
    for first in sorted(kept):
        rows = kept[first]
        if first <= at < first + len(rows):
            pieces.append(rows[at - first :])
            at = first + len(rows)
    return pieces if at >= end else None
