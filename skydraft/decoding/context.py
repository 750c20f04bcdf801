"""The final part of a text: the prompt and the committed tokens. It grows only at its end."""

from __future__ import annotations

from skydraft.decoding.scoring import Scores
from skydraft.engines.base import TokenBuffer
from skydraft.engines.vocab import TokenIds
from skydraft.errors import BaseMismatch
from skydraft.types import DraftBlock, FinishReason, Prompt, Verdict


class Context:
    """Prompt and committed tokens of one generation, and the number that the target has seen.

    With `finish` it has ended before its first token. `scores` are those of its tokens, if they are wanted.
    """

    def __init__(self, prompt: Prompt, *, scores: Scores | None = None, finish: FinishReason | None = None) -> None:
        self.scores = scores
        self._tokens = TokenBuffer(prompt.token_ids)
        self._prompt_len = len(prompt.token_ids)
        self._num_seen = 0
        self._finish = finish

    @property
    def base(self) -> int:
        """Number of committed generated tokens."""
        return len(self._tokens) - self._prompt_len

    @property
    def token_ids(self) -> TokenIds:
        """Read-only view of prompt and committed tokens, [prompt length + base]."""
        return self._tokens.view

    @property
    def generated(self) -> TokenIds:
        """Read-only view of the committed tokens without the prompt, [base]."""
        return self._tokens.view[self._prompt_len :]

    @property
    def num_seen(self) -> int:
        """Number of generated tokens that the target knows: all up to its last verdict."""
        return self._num_seen

    @property
    def catch_up(self) -> tuple[int, ...]:
        """Tokens committed by skips since the last verdict."""
        return tuple(self.generated[self._num_seen :].tolist())

    @property
    def finish(self) -> FinishReason | None:
        """Why the generation ended, or None before its end."""
        return self._finish

    def commit_skip(self, block: DraftBlock, finish: FinishReason | None) -> tuple[int, ...]:
        """Commit a whole block without a verdict. Raises BaseMismatch."""
        return self._commit(block.base, block.token_ids, finish)

    def commit_verdict(self, block: DraftBlock, verdict: Verdict) -> tuple[int, ...]:
        """Commit the accepted tokens of a block and the target's own token. Raises BaseMismatch."""
        if verdict.base != block.base:
            raise BaseMismatch(verdict.base, block.base)
        committed = self._commit(block.base, verdict.commits(block), verdict.finish)
        self._num_seen = self.base
        return committed

    def interrupt(self) -> None:
        """End the generation with the tokens committed so far."""
        self._finish = self._finish or "interrupted"

    def _commit(self, base: int, token_ids: tuple[int, ...], finish: FinishReason | None) -> tuple[int, ...]:
        if base != self.base:
            raise BaseMismatch(base, self.base)
        self._tokens.extend(token_ids)
        self._finish = finish or self._finish  # an interrupt during the round stays
        return token_ids
