"""What a server without skydraft is asked to follow, and the choices of a text by what it tells.

It applies penalties, biases and grammars by itself. A grammar begins with a request, so the request at the beginning of
the answer carries it; each token that comes is held against it.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from skydraft.choosing.chooser import Chooser
from skydraft.choosing.thinking import ThinkingAlong
from skydraft.config import DecodingParams
from skydraft.decoding.plan import Plan
from skydraft.edge.server import check_drafts
from skydraft.edge.stock.dialect import Dialect, Row
from skydraft.engines.vocab import TokenIds, Vocab
from skydraft.errors import CloudFailure, LeftGrammar, OptionError

# What the edge sees to, or every server takes. With `min_call_prob` the draft model is careful; a server decides alone.
_EVERYWHERE = frozenset((
    "max_new_tokens", "stop", "sentences", "temperature", "top_p", "seed", "grammar", "think_budget", "think_start",
    "think_end", "min_call_prob",
))  # fmt: skip
_WITH_IDS = frozenset(("top_k", "min_p", "stop_token_ids"))
_COUNTED = ("grammar", "presence_penalty", "frequency_penalty")  # by a server: from the beginning of a request
_OFF = DecodingParams()


def _given(params: DecodingParams) -> set[str]:
    return {each.name for each in fields(params) if getattr(params, each.name) != getattr(_OFF, each.name)}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check(params: DecodingParams, plan: Plan, kind: type[Dialect]) -> None:
    """Raise OptionError for what a server of this kind cannot follow."""
    check_drafts(plan, kind.name)
    given, there = _given(params), f"at a server without skydraft ({kind.name})"
    takes = kind.takes | _EVERYWHERE | (_WITH_IDS if kind.gives_ids else set())
    if unfit := sorted(given - takes):
        hint = "Leave it out (a --style, too), or use skydraft serve."
        raise OptionError(f"{_flag(unfit[0])} does not apply {there}.", hint=hint)
    if plan.drafts and not plan.streams and (unfit := [each for each in _COUNTED if each in given]):
        hint = "Choose --mode lossless or cloud, or use skydraft serve."
        raise OptionError(f"{_flag(unfit[0])} needs a mode that streams {there}.", hint=hint)
    if params.min_new_tokens and params.think_end:
        hint = "Add --think off, or use skydraft serve."
        raise OptionError(f"--min-new-tokens would count thoughts {there}.", hint=hint)
    if params.grammar and (grammar := params.grammar.partition(":")[0]) not in kind.grammars:
        says = f"A grammar of the kind {grammar}, as of a tool that must be called, does not apply {there}."
        raise OptionError(says, hint=f"It takes {', '.join(kind.grammars) or 'none'}; skydraft serve takes all.")


class _Told(Chooser):
    def choose(self, row: npt.NDArray[np.int32], prefix: TokenIds) -> int:
        return int(row)  # in place of a row of logits stands the token that the server wrote


@dataclass(frozen=True)
class Choices:
    """How the tokens of one text are chosen at a server of a kind that `check` found fit. For one thread at a time.

    The server chooses. Above temperature 0 it draws, with random numbers of its own.
    """

    params: DecodingParams
    vocab: Vocab
    prompt_len: int
    kind: type[Dialect]

    @cached_property
    def chooser(self) -> Chooser:
        """What the rules of a verification choose with."""
        return _Told(replace(self.params, min_call_prob=0.0), self.vocab, self.prompt_len)

    @cached_property
    def _thinking(self) -> ThinkingAlong | None:
        """A chat's text has no thoughts."""
        return ThinkingAlong(self.params, self.vocab) if self.params.think_end and self.kind.gives_ids else None

    def begins(self, text: TokenIds, first: int | None = None) -> bool:
        """Whether the grammar, if there is one, begins after `text`. Where a text may think, its `first` token says so,
        or the end of its thinking."""
        generated = text[self.prompt_len :]
        if not (self.params.grammar and self._thinking):
            return bool(self.params.grammar) and not len(generated)
        place = self._thinking.at(generated)
        if first is None or len(generated) or not 0 <= first < self.vocab.size:
            return place.has_ended and place.start == len(generated)
        return self._thinking.at(np.array([first], np.int32)).thought.phase == "answer"

    def asked(self, text: TokenIds, *, with_grammar: bool) -> DecodingParams:
        """The parameters of a request that writes on after `text`."""
        num_left = max(self.params.min_new_tokens - (len(text) - self.prompt_len), 0)
        return replace(self.params, grammar=self.params.grammar if with_grammar else "", min_new_tokens=num_left)

    def forced(self, text: TokenIds) -> int | None:
        """The token that comes after `text` whatever a server writes: of the end of its thinking, or its own end."""
        if self._thinking and (token_id := self._thinking.forced(text[self.prompt_len :])) is not None:
            return token_id
        token_id = self.chooser.forced(text) if self.params.grammar else None
        return token_id if token_id in self.vocab.end_ids else None

    def taken(self, row: Row, prefix: TokenIds, end_id: int) -> int:
        """The token that the text takes after `prefix`. Raises LeftGrammar."""
        if row.token_id >= self.vocab.size:
            raise CloudFailure(f"The server wrote the token {row.token_id}, which the vocabulary does not have.")
        if row.finish:
            return end_id
        if self.params.grammar and self._leaves(prefix, row.token_id):
            raise LeftGrammar("The server writes what its grammar does not allow here.")
        return row.token_id

    def _leaves(self, prefix: TokenIds, token_id: int) -> bool:
        """A server may spell what the grammar allows by other tokens than ours."""
        if token_id in self.vocab.end_ids:
            zeros = np.zeros(self.vocab.size, np.float32)
            return bool(self.chooser.follow_grammar(zeros, prefix)[token_id] == -np.inf)
        return self.chooser.has_left(np.append(prefix, np.int32(token_id)))
