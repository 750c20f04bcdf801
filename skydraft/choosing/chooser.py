"""The one function that picks tokens, for draft and target, in every mode: choose(logits, prefix).

`choose_all` answers for the rows of many generations at once, with the same tokens: over the processor's cores, or on
the device where the rows lie.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import array_api_compat
import numpy.typing as npt

from skydraft.choosing.constraints import apply, constraints_of
from skydraft.choosing.grammar import GrammarAlong, compile_grammar
from skydraft.choosing.sampling import no_number, sample, sample_on_device
from skydraft.config import DecodingParams, num_cores
from skydraft.engines.rows import at_least_float32, is_on_host, namespace_of, on_host
from skydraft.engines.vocab import TokenIds, Vocab
from skydraft.errors import EngineError

Picked: TypeAlias = int | Exception
_NUM_THREADS = min(num_cores(), 8)  # reading rows is bound by memory
_SHARE = 16  # rows that are worth a thread


class Chooser:
    """`choose` for one generation. It has no random state; it caches what it computed along a prefix, so it is for one
    thread at a time.

    Steps, in order, on the raw logits:
      0. with a grammar, -inf for every token that it forbids; where other constraints ban all that it allows, the
         grammar wins
      1. repetition penalty (as transformers), frequency and presence penalty, logit bias (as OpenAI), n-gram ban,
         minimum length (as transformers)
      2. style constraints
      3. temperature, once; top-k; top-p; min-p
      4. argmax of log p + noise(seed, position, token id)
    Raises OptionError when a zh style meets a vocabulary without Chinese, or a bias an id that is no token;
    GrammarRefused or MissingDependency for a grammar that does not compile here.
    """

    def __init__(self, params: DecodingParams, vocab: Vocab, prompt_len: int) -> None:
        self.params = params
        self._prompt_len = prompt_len
        self._grammar: GrammarAlong | None = None
        if params.grammar:
            self._grammar = GrammarAlong(compile_grammar(params.grammar, vocab), vocab, prompt_len)
        self._constraints = constraints_of(params, vocab, prompt_len)

    def choose(self, row: Any, prefix: TokenIds) -> int:
        """The token that follows `prefix` given its raw logits `row` [vocab]. Pure: same inputs, same token.

        At temperature 0 the best one, the lowest id among equals. Raises EngineError when a logit is not a number.
        """
        scores = self.constrain(row, prefix)
        if is_on_host(scores):
            return self._pick(on_host(scores), prefix)
        (picked,) = pick_on_device([scores], [self.params], [self.position(prefix)])
        if isinstance(picked, Exception):
            raise picked
        return picked

    def _pick(self, scores: npt.NDArray[Any], prefix: TokenIds) -> int:
        """The token from edited logits in host memory."""
        if self.params.temperature:
            return sample(scores, self.params, self.position(prefix))
        best = int(scores.argmax())
        if scores[best] != scores[best]:
            raise no_number()
        return best

    def position(self, prefix: TokenIds) -> int:
        """The position of the token after `prefix`, from the end of the prompt: both sides may read other prompts."""
        return len(prefix) - self._prompt_len

    def constrain(self, row: Any, prefix: TokenIds) -> Any:
        """Steps 0 to 2: edited logits [vocab], at least float32. Where 1 and 2 ban every token, step 0 alone."""
        row = self.follow_grammar(row, prefix)
        if not self._constraints:
            return row
        edited = apply(row, (edit for constraint in self._constraints for edit in constraint(prefix)))
        return row if float(edited.max()) == -float("inf") else edited

    def follow_grammar(self, row: Any, prefix: TokenIds) -> Any:
        """Step 0: logits [vocab], at least float32, with -inf for tokens that the grammar forbids."""
        row = at_least_float32(row)
        return self._grammar.masked(row, prefix) if self._grammar else row

    @property
    def has_grammar(self) -> bool:
        """Whether the text follows a grammar."""
        return self._grammar is not None

    def forced(self, prefix: TokenIds) -> int | None:
        """The only token that the grammar allows after `prefix`, whatever the logits; None if there are more."""
        return self._grammar.forced(prefix) if self._grammar else None

    def rank(self, row: Any, prefix: TokenIds, token_id: int) -> int:
        """How many tokens have a higher edited logit: 0 for the greedy choice, all for a banned token."""
        edited = self.constrain(row, prefix)
        if float(edited[token_id]) == -float("inf"):
            return len(edited)
        return int((edited > edited[token_id]).sum())


@dataclass(frozen=True, slots=True)
class Question:
    """Which token follows `prefix`, given its raw logits `row` [vocab]?"""

    chooser: Chooser
    row: Any
    prefix: TokenIds


def choose_all(questions: Seq[Question]) -> list[Picked]:
    """`choose` for each question, or the error that it raises: one bad row does not spoil the others."""
    if len(questions) == 1:  # as in every round of one text: the way of many takes twice as long
        try:
            return [questions[0].chooser.choose(questions[0].row, questions[0].prefix)]
        except Exception as error:
            return [error]
    picked: list[Picked] = [0] * len(questions)
    here: dict[int, npt.NDArray[Any]] = {}  # edited logits [vocab] by question
    away: dict[int, Any] = {}
    for index, asked in enumerate(questions):
        try:
            scores = asked.chooser.constrain(asked.row, asked.prefix)
        except Exception as error:
            picked[index] = error
        else:
            if is_on_host(scores):
                here[index] = on_host(scores)
            else:
                away[index] = scores
    params = [asked.chooser.params for asked in questions]
    positions = [asked.chooser.position(asked.prefix) for asked in questions]
    greedy = [index for index in here if not params[index].temperature]
    for index, best in zip(greedy, _best_of_each([here[index] for index in greedy]), strict=True):
        picked[index] = best if here[index][best] == here[index][best] else no_number()
    for index in here.keys() - greedy:
        try:
            picked[index] = sample(here[index], params[index], positions[index])
        except EngineError as error:
            picked[index] = error
    tokens = pick_on_device(list(away.values()), [params[at] for at in away], [positions[at] for at in away])
    for index, token in zip(away, tokens, strict=True):
        picked[index] = token
    return picked


def _best_of_each(rows: Seq[npt.NDArray[Any]]) -> list[int]:
    """The index of the highest, or first NaN, of each row. Each core takes a share: numpy releases the GIL."""
    num_shares = min(_NUM_THREADS, len(rows) // _SHARE)
    if num_shares < 2:
        return _argmax(rows)
    best = [0] * len(rows)
    others = [_threads().submit(_argmax, rows[share::num_shares]) for share in range(1, num_shares)]
    best[::num_shares] = _argmax(rows[::num_shares])
    for share, other in enumerate(others, 1):
        best[share::num_shares] = other.result()
    return best


def _argmax(rows: Seq[npt.NDArray[Any]]) -> list[int]:
    return [int(row.argmax()) for row in rows]


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(_NUM_THREADS - 1, 1), thread_name_prefix="choosing")


def pick_on_device(scores: Seq[Any], params: Seq[DecodingParams], positions: Seq[int]) -> list[Picked]:
    """Tokens from edited logits [vocab] each on another device: one argmax for all, one sample for those at T > 0."""
    if not scores:
        return []
    xp = namespace_of(scores[0])
    rows = xp.stack(list(scores))  # [num_rows, vocab]
    best = xp.argmax(rows, axis=1)
    is_nan = xp.isnan(xp.take_along_axis(rows, best[:, None], axis=1))[:, 0]
    both = on_host(xp.stack([best, xp.astype(is_nan, best.dtype)]))  # in one copy
    picked: list[Picked] = [no_number() if nan else int(token) for token, nan in both.T.tolist()]
    drawn = [at for at, each in enumerate(params) if each.temperature and isinstance(picked[at], int)]
    if drawn:
        kept = rows if len(drawn) == len(rows) else rows[xp.asarray(drawn, device=array_api_compat.device(rows))]
        tokens = sample_on_device(kept, [params[at] for at in drawn], [positions[at] for at in drawn])
        for at, token in zip(drawn, tokens, strict=True):
            picked[at] = token
    return picked
