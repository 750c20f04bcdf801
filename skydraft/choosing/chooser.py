"""The one function that picks tokens, for draft and target, in every mode: choose(logits, prefix).

`choose_all` does it for the rows of many generations at once, with the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from skydraft.choosing.chinese_style import style_constraints
from skydraft.choosing.constraints import (
    Constraint,
    Edit,
    apply,
    logit_bias,
    no_end_before,
    no_repeat_ngram,
    occurrence_penalty,
    repetition_penalty,
)
from skydraft.choosing.grammar import GrammarAlong, compile_grammar
from skydraft.choosing.picking import Draw, Picked, pick, pick_one
from skydraft.choosing.sentences import said_along
from skydraft.config import DecodingParams
from skydraft.engines.rows import at_least_float32
from skydraft.engines.vocab import TokenIds, Vocab, check_chinese
from skydraft.errors import EngineError, OptionError


class Chooser:
    """`choose` with everything but the row and the prefix filled in. Holds no random state, and nothing of a prefix but
    caches, so it is for one thread at a time.

    Steps, in order, on the raw logits:
      0. where there is a grammar, -inf for all that may not come next by it; where other constraints ban all that may,
         the grammar wins
      1. repetition penalty (as transformers), frequency and presence penalty, logit bias (as OpenAI), n-gram ban,
         minimum length (as transformers)
      2. style constraints
      3. temperature, once; top-k; top-p; min-p
      4. argmax of log p + noise(seed, position, token id)
    Raises OptionError when a zh style meets a vocabulary without Chinese, or a bias an id that is no token;
    GrammarRefused or MissingDependency for a grammar that does not compile here.
    """

    def __init__(self, params: DecodingParams, vocab: Vocab, prompt_len: int) -> None:
        self._params = params
        self._prompt_len = prompt_len
        self._constraints: list[Constraint] = []
        self._grammar: GrammarAlong | None = None
        if params.grammar:
            self._grammar = GrammarAlong(compile_grammar(params.grammar, vocab), vocab, prompt_len)
        if params.repetition_penalty != 1:
            self._constraints.append(repetition_penalty(params.repetition_penalty))
        if params.frequency_penalty or params.presence_penalty:
            penalties = params.frequency_penalty, params.presence_penalty
            self._constraints.append(occurrence_penalty(*penalties, prompt_len))
        if params.logit_bias:
            if (highest := params.logit_bias[-1][0]) >= vocab.size:
                raise OptionError(f"--logit-bias: the vocabulary of {vocab.size} tokens has no id {highest}.")
            self._constraints.append(logit_bias(params.logit_bias))
        if params.no_repeat_ngram_size:
            self._constraints.append(no_repeat_ngram(params.no_repeat_ngram_size))
        if params.min_new_tokens:
            ban = no_end_before(params.min_new_tokens, prompt_len, vocab.end_ids)
            # A model that has said what it was asked for may end: held on, it would begin something else.
            self._constraints.append(unless_said(params.sentences, vocab, prompt_len, ban) if params.sentences else ban)
        if params.shapes_chinese:
            check_chinese(vocab)
            self._constraints += style_constraints(params, vocab, prompt_len)

    def choose(self, row: Any, prefix: TokenIds) -> int:
        """The token that follows `prefix` given its raw logits `row` [vocab]. Pure: same inputs, same token.

        At temperature 0 the best one, the lowest id among equals. Raises EngineError when a logit is not a number.
        """
        return pick_one(self.draw(row, prefix))

    def runner_up(self, row: Any, prefix: TokenIds, best: int) -> int:
        """What `choose` would give without `best`, a guess at what another model says; `best` where it has no rival."""
        edited = self.constrain(row, prefix) + 0  # a copy
        edited[best] = -float("inf")
        if float(edited.max()) == -float("inf"):
            return best
        try:
            return pick_one(Draw(edited, self._params, len(prefix) - self._prompt_len))
        except EngineError:
            return best

    def draw(self, row: Any, prefix: TokenIds) -> Draw:
        """What is left to pick from, and how."""
        # Positions count from the end of the prompt, which may read differently on the two sides.
        return Draw(self.constrain(row, prefix), self._params, len(prefix) - self._prompt_len)

    def constrain(self, row: Any, prefix: TokenIds) -> Any:
        """Steps 0 to 2: edited logits [vocab], at least float32. Where 1 and 2 ban all, they are those of step 0."""
        row = self.follow_grammar(row, prefix)
        if not self._constraints:
            return row
        edited = apply(row, (edit for constraint in self._constraints for edit in constraint(prefix)))
        return row if float(edited.max()) == -float("inf") else edited

    def follow_grammar(self, row: Any, prefix: TokenIds) -> Any:
        """Step 0: logits [vocab], at least float32, without what may not come next by the grammar."""
        row = at_least_float32(row)
        return self._grammar.masked(row, prefix) if self._grammar else row

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar says what may come next."""
        return self._grammar is not None

    def forced(self, prefix: TokenIds) -> int | None:
        """What `choose` gives whatever the logits: the only token that the grammar allows after `prefix`, or None."""
        return self._grammar.forced(prefix) if self._grammar else None

    def rank(self, row: Any, prefix: TokenIds, token_id: int) -> int:
        """How many tokens the constrained row puts before `token_id`: 0 is its greedy choice, a ban is behind all."""
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
    """`choose` for each of them, or the error that it raises: one bad row says nothing about the others."""
    drawn: list[Draw | Exception] = []
    for asked in questions:
        try:
            drawn.append(asked.chooser.draw(asked.row, asked.prefix))
        except Exception as error:
            drawn.append(error)
    picked = iter(pick([draw for draw in drawn if isinstance(draw, Draw)]))
    return [draw if isinstance(draw, Exception) else next(picked) for draw in drawn]


def unless_said(sentences: int, vocab: Vocab, prompt_len: int, ban: Constraint) -> Constraint:
    """`ban`, except where the generated text is complete: it ends a sentence, and has as many as wanted."""

    said = said_along(vocab)

    def lifted(prefix: TokenIds) -> Iterable[Edit]:
        edits = list(ban(prefix))
        return [] if edits and said.at(prefix[prompt_len:]).has(sentences) else edits

    return lifted
