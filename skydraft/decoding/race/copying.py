"""Drafts without a model: the tokens that followed an earlier copy of the last tokens, in the text or a prediction.

Prompt lookup (github.com/apoorvumang/prompt-lookup-decoding); costs and success decide the length.
"""

from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import replace

from skydraft.decoding.race.branch import Worth
from skydraft.decoding.race.cost_model import CostModel, Losses
from skydraft.engines.vocab import TokenIds

MIN_MATCH = 8  # tokens; shorter runs occur in too many places
MAX_COPIED = 16
_LOOK_BACK, _NUM_PLACES = 64, 8  # tokens to compare; newest places of a run to try
_PRIOR = 0.9  # the chance that a copied token is right
_MIN_GAIN = 1.02
_DOUBT = 2.0  # a run of n equal tokens continues with the chance 1 - 2 / n
_FREE_TOKENS = 2.0  # copies may cost the target's time for this many tokens
_END = -1  # marks the end of the prediction: copies stop there


class Copies:
    """An index of all runs of `MIN_MATCH` tokens in a text, and in its `prediction`, indexed as if it followed the
    prompt. At most `longest` tokens are drafted, fewer if `costs` are known and say so."""

    def __init__(
        self, prompt: Seq[int], prediction: Seq[int] = (), longest: int = MAX_COPIED, costs: CostModel | None = None
    ) -> None:  # fmt: skip
        self._tokens: list[int] = []
        self._places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # where a run ends
        self._longest, self._costs = min(longest, MAX_COPIED), costs and replace(costs, draft_ms=0.0)
        self._losses = Losses(costs.plain_ms, _FREE_TOKENS) if costs else None
        self._worth = Worth(_PRIOR)
        if prediction:
            self._add([*prompt[-MIN_MATCH:], *prediction, _END])
        self._begin = len(self._tokens)  # where the text begins

    def draft(self, text: TokenIds) -> tuple[int, ...]:
        """Return tokens that may follow `text`, which has grown since the last call; none without a match or a gain."""
        new = text[(num_known := len(self._tokens) - self._begin) :].tolist()
        if self._losses and num_known:
            self._losses.wrote(len(new))
        self._add(new)
        tokens = self._tokens
        found = self._places.get(tuple(tokens[-MIN_MATCH:]), [])
        tried = found[-_NUM_PLACES:] + found[:1]
        places = [place for place in tried if tokens[place : place + 1] not in ([], [_END])]
        match, place = max(map(self._match, places), default=(0, 0))
        if not (length := self._length(match)):
            self._worth.note(_PRIOR, 0.1)  # wrong copies elsewhere say little about this place
            return ()
        copied = tokens[place : place + length]
        return tuple(copied[: copied.index(_END)] if _END in copied else copied)

    @property
    def share(self) -> float:
        """The recent share of right copies."""
        return self._worth.share

    def observe(self, num_accepted: int, num_drafted: int) -> None:
        for index in range(min(num_accepted + 1, num_drafted)):  # judging ends at the first difference
            self._worth.note(index < num_accepted)
        if self._costs and self._losses:
            self._losses.note(self._costs.verify_ms(self.share, num_drafted), num_accepted + 1)

    def _add(self, token_ids: Seq[int]) -> None:
        for token_id in token_ids:
            self._tokens.append(token_id)
            run = tuple(self._tokens[-MIN_MATCH:])
            if len(run) == MIN_MATCH and _END not in run:
                self._places[run].append(len(self._tokens))

    def _match(self, place: int) -> tuple[int, int]:
        """Return (number of tokens before `place` that equal the text's last ones, place): max takes the newest."""
        tokens, length = self._tokens, 0
        while length < min(_LOOK_BACK, place) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        return length, place

    def _length(self, match: int) -> int:
        if not match or self._costs is None or self._losses is None:
            return self._longest if match else 0
        # A long match probably continues.
        k, gain = self._costs.best(min(self._worth.share, 1 - _DOUBT / match), self._longest)
        return k if gain >= _MIN_GAIN and self._losses.allow() else 0
