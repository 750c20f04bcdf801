"""The choices of a text by what a server tells of them: its own tokens, or its best ones with log-probabilities.

What the parameters change in the target's logits (a grammar, bans, penalties, a bias) changes these best tokens here.
Each change is monotone in a token's own logit, so a token that the server did not tell, and which has at most the
lowest logit of those that it told, has a bound after it. Where the best allowed one is not below it, it is the
target's own constrained choice. Else one more request says which tokens may come.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from skydraft.choosing.chooser import Chooser
from skydraft.config import DecodingParams
from skydraft.decoding.plan import Plan
from skydraft.edge.stock.dialect import Drawing, Row
from skydraft.engines.vocab import Mask, TokenIds, Vocab
from skydraft.errors import CloudFailure, OptionError

MAX_BEST = 20  # log-probabilities of so many tokens; vLLM gives no more unless told to at its start
# What changes no logits. With `min_call_prob` the draft model is careful about calls; a server decides by itself.
_KEPT = frozenset((
    "max_new_tokens", "stop", "stop_token_ids", "sentences", "temperature", "top_k", "top_p", "min_p", "seed",
    "min_call_prob", "think_start", "think_end",
))  # fmt: skip
_BANS = (
    "grammar", "no_repeat_ngram_size", "min_new_tokens", "content_ngram_size", "no_adjacent_repeat", "comma_gap",
    "think_budget",
)  # fmt: skip
_SCALES = ("repetition_penalty", "content_penalty")  # by the sign of a logit, which log-probabilities do not tell
_OFF = DecodingParams()
_HINT = "--content-penalty 1 turns that of a style off; vLLM and llama-server take a repetition penalty without others."


def _check_text(params: DecodingParams, plan: Plan) -> None:
    """Raise OptionError for what a server that gives text cannot follow."""
    there = "does not apply to a server that gives text, not token ids"
    if params.top_k or params.min_p or params.stop_token_ids:
        raise OptionError(f"One of --top-k, --min-p and stop_token_ids {there}.")
    if others := [name for name in _changing(params) if name != "grammar"]:
        raise OptionError(f"{_flag(others[0])} {there}: it changes the target's logits.")
    if params.grammar and not plan.may_go_alone:
        hint = "Choose --mode quality: the draft model goes on where the server's text leaves the grammar."
        raise OptionError(f"--grammar in a mode without a gate {there}.", hint=hint)


def _changing(params: DecodingParams) -> list[str]:
    """The parameters that change the target's logits."""
    names = (each.name for each in fields(params))
    return [name for name in names if name not in _KEPT and getattr(params, name) != getattr(_OFF, name)]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class _Told(Chooser):
    def choose(self, row: npt.NDArray[np.int32], prefix: TokenIds) -> int:
        return int(row)  # in place of a row of logits stands the token that the server wrote


@dataclass(frozen=True)
class Choices:
    """How one text's tokens are chosen at a server of a `kind`. For one thread at a time.

    Above temperature 0 the best tokens are enough where top-k keeps no others; else the server draws, with random
    numbers of its own. So it does for a stream: each draw of ours that differs from what it writes costs a request.
    Raises OptionError for parameters that the server cannot follow.
    """

    params: DecodingParams
    plan: Plan
    vocab: Vocab
    prompt_len: int
    kind: str

    def __post_init__(self) -> None:
        params, changing = self.params, _changing(self.params)
        if self.gives_text:
            _check_text(params, self.plan)
        if not self._is_native and (scales := [name for name in changing if name in _SCALES]):
            raise OptionError(f"{_flag(scales[0])} needs logits, and this server tells log-probabilities.", hint=_HINT)
        if self._draws_there and not self._is_native and (shifts := [name for name in changing if name not in _BANS]):
            raise OptionError(f"{_flag(shifts[0])} needs --top-k 1 to {MAX_BEST} here, or --temperature 0.")

    @property
    def gives_text(self) -> bool:
        return self.kind in ("completions", "chat")

    @cached_property
    def _draws_there(self) -> bool:
        params = self.params
        is_ours = 0 < params.top_k <= MAX_BEST and ((self.plan.drafts and not self.plan.streams) or self._constrains)
        return bool(params.temperature) and (self.gives_text or not is_ours)

    @cached_property
    def _is_native(self) -> bool:
        """Whether the server does all that changes its logits: a repetition penalty is the same everywhere."""
        is_alone = _changing(self.params) == ["repetition_penalty"]
        is_ours = self.params.temperature and 0 < self.params.top_k <= MAX_BEST
        return is_alone and not is_ours and self.kind != "sglang"

    @cached_property
    def drawing(self) -> Drawing:
        penalty = self.params.repetition_penalty if self._is_native else 1.0
        if self._draws_there or self.gives_text or self._is_native:
            return Drawing(drawn=self.params if self.params.temperature else None, penalty=penalty)
        return Drawing(MAX_BEST if self._constrains else self._num_needed)

    @cached_property
    def _num_needed(self) -> int:
        return self.params.top_k if self.params.temperature else 0

    @cached_property
    def _constrains(self) -> bool:
        return bool(_changing(self.params)) and not self._is_native

    @cached_property
    def chooser(self) -> Chooser:
        """What the rules of a verification choose with."""
        kind = Chooser if self.drawing.num_best else _Told
        return kind(replace(self.params, min_call_prob=0.0), self.vocab, self.prompt_len)

    def allowed(self, prefix: TokenIds) -> Mask | None:
        """The tokens that text may go on with, [vocab]; None if that may be any."""
        return self.changes(prefix) > -np.inf if self.gives_text and self._constrains else None

    def only(self, token_id: int) -> npt.NDArray[Any]:
        """The row of which this token is the choice."""
        if not self.drawing.num_best:
            return np.array(token_id, np.int32)
        logits = np.full(self.vocab.size, -np.inf, np.float32)
        logits[token_id] = 0.0
        return logits

    def changes(self, prefix: TokenIds) -> npt.NDArray[np.float32]:
        """What is added to each logit after a prefix, [vocab]: -inf for a token that is not allowed."""
        return self.chooser.constrain(np.zeros(self.vocab.size, np.float32), prefix)

    def row_of(self, row: Row, prefix: TokenIds, end_id: int) -> npt.NDArray[Any] | None:
        """What a verification takes: the token that the server wrote; or, where the edge chooses, logits [vocab], -inf
        for all tokens that the server did not tell about. None if one of those may be the choice."""
        if row.token_id >= self.vocab.size:
            raise CloudFailure(f"The server wrote the token {row.token_id}, which the vocabulary does not have.")
        if row.finish:
            return self.only(end_id)
        if not self.drawing.num_best:
            is_banned = self._constrains and self.changes(prefix)[row.token_id] == -np.inf
            return None if is_banned else self.only(row.token_id)
        logits = self._logits(row)
        return logits if not self._constrains or self._is_enough(logits, prefix) else None

    def _logits(self, row: Row) -> npt.NDArray[np.float32]:
        told, num_asked = dict(row.best), self.drawing.num_best
        if len(told) < num_asked:
            raise CloudFailure(f"The server told {len(told)} log-probabilities in place of {num_asked}.")
        logits = np.full(self.vocab.size, -np.inf, np.float32)
        for token_id, value in told.items():
            if token_id < self.vocab.size:  # beyond are rows that pad the model's matrix
                logits[token_id] = value
        return logits

    def _is_enough(self, logits: npt.NDArray[np.float32], prefix: TokenIds) -> bool:
        """Whether no token that the server did not tell can be chosen: it has at most the lowest of those logits."""
        told, num_needed = logits > -np.inf, self._num_needed
        lowest = np.sort(logits[told])[-self.drawing.num_best :].min(initial=np.inf)  # vLLM tells its own token, too
        scores = self.chooser.constrain(np.where(told, logits, lowest), prefix)
        bound, best = scores[~told].max(initial=-np.inf), np.sort(scores[told])[::-1]
        if bound == -np.inf or not num_needed:
            return bool(told[scores.argmax()])  # among equals the lowest id is chosen
        return bool(len(best) >= num_needed and best[num_needed - 1] >= bound)
