"""The options that a server without skydraft can follow, and a text's choices from its tokens.

The server applies penalties, biases and grammars. A grammar starts with a request, so only the request at the answer's
beginning carries it. Each token is checked against the grammar here.
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

# Options that the edge applies itself or every server takes. `min_call_prob` is for the draft model only.
_EVERYWHERE = frozenset((
    "max_new_tokens", "stop", "sentences", "temperature", "top_p", "seed", "grammar", "think_budget", "think_start",
    "think_end", "min_call_prob",
))  # fmt: skip
_WITH_IDS = frozenset(("top_k", "min_p", "stop_token_ids"))
_COUNTED = ("grammar", "presence_penalty", "frequency_penalty")  # servers apply them from the request's first token
_OFF = DecodingParams()


def _given(params: DecodingParams) -> set[str]:
    return {each.name for each in fields(params) if getattr(params, each.name) != getattr(_OFF, each.name)}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check(params: DecodingParams, plan: Plan, kind: type[Dialect]) -> None:
    """Raise OptionError for options that this kind of server cannot follow."""
    check_drafts(plan, kind.name)
    given, there = _given(params), f"at a server without skydraft ({kind.name})"
    takes = kind.takes | _EVERYWHERE | (_WITH_IDS if kind.gives_ids else set())
    if unfit := sorted(given - takes):
        hint = "Leave it out, or the --style that sets it, or use skydraft serve."
        raise OptionError(f"{_flag(unfit[0])} does not apply {there}.", hint=hint)
    if plan.drafts and not plan.streams and (unfit := [each for each in _COUNTED if each in given]):
        hint = "Choose --mode lossless or cloud, or use skydraft serve."
        raise OptionError(f"{_flag(unfit[0])} needs a mode that streams {there}.", hint=hint)
    if params.min_new_tokens and params.think_end:
        hint = "Add --think off, or use skydraft serve."
        raise OptionError(f"--min-new-tokens would count thoughts {there}.", hint=hint)
    if params.grammar and (grammar := params.grammar.partition(":")[0]) not in kind.grammars:
        says = f"A grammar of the kind {grammar}, as for a required tool call, does not apply {there}."
        raise OptionError(says, hint=f"It takes {', '.join(kind.grammars) or 'none'}; skydraft serve takes all.")


class _Told(Chooser):
    def choose(self, row: npt.NDArray[np.int32], prefix: TokenIds) -> int:
        return int(row)  # the "row" is the server's token, not logits


@dataclass(frozen=True)
class Choices:
    """The choice of one text's tokens at a kind of server that `check` accepted. For one thread at a time.

    The server chooses. Above temperature 0 it uses its own random numbers.
    """

    params: DecodingParams
    vocab: Vocab
    prompt_len: int
    kind: type[Dialect]

    @cached_property
    def chooser(self) -> Chooser:
        """The chooser of the verification's rules."""
        return _Told(replace(self.params, min_call_prob=0.0), self.vocab, self.prompt_len)

    @cached_property
    def _thinking(self) -> ThinkingAlong | None:
        """The tracker of thoughts; None at a chat, whose text has none."""
        return ThinkingAlong(self.params, self.vocab) if self.params.think_end and self.kind.gives_ids else None

    def begins(self, text: TokenIds, first: int | None = None) -> bool:
        """Return whether a grammar starts after `text`. If the text may think, this depends on its `first` token, or
        on the end of its thinking."""
        generated = text[self.prompt_len :]
        if not (self.params.grammar and self._thinking):
            return bool(self.params.grammar) and not len(generated)
        place = self._thinking.at(generated)
        if first is None or len(generated) or not 0 <= first < self.vocab.size:
            return place.has_ended and place.start == len(generated)
        return self._thinking.at(np.array([first], np.int32)).thought.phase == "answer"

    def asked(self, text: TokenIds, *, with_grammar: bool) -> DecodingParams:
        """Return the parameters of a request that continues `text`."""
        num_left = max(self.params.min_new_tokens - (len(text) - self.prompt_len), 0)
        return replace(self.params, grammar=self.params.grammar if with_grammar else "", min_new_tokens=num_left)

    def forced(self, text: TokenIds) -> int | None:
        """Return the token that must follow `text`: it ends the thinking or the text. None leaves it to the server."""
        if self._thinking and (token_id := self._thinking.forced(text[self.prompt_len :])) is not None:
            return token_id
        token_id = self.chooser.forced(text) if self.params.grammar else None
        return token_id if token_id in self.vocab.end_ids else None

    def taken(self, row: Row, prefix: TokenIds, end_id: int) -> int:
        """Return the text's token after `prefix`. Raises LeftGrammar, or CloudFailure for an unknown token."""
        if row.token_id >= self.vocab.size:
            raise CloudFailure(f"The server wrote the token {row.token_id}, which the vocabulary does not have.")
        if row.finish:
            return end_id
        if self.params.grammar and self._leaves(prefix, row.token_id):
            raise LeftGrammar("The server wrote a token that the grammar does not allow here.")
        return row.token_id

    def _leaves(self, prefix: TokenIds, token_id: int) -> bool:
        """Return whether a token violates the grammar. Compares text: a server may split it into other tokens."""
        if token_id in self.vocab.end_ids:
            zeros = np.zeros(self.vocab.size, np.float32)
            return bool(self.chooser.follow_grammar(zeros, prefix)[token_id] == -np.inf)
        return self.chooser.has_left(np.append(prefix, np.int32(token_id)))
