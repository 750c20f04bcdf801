"""What is final: the prompt and the committed tokens. It only grows, and only from where it ends."""

from __future__ import annotations

from typing import Protocol

from skydraft.engines.base import TokenBuffer
from skydraft.engines.vocab import TokenIds
from skydraft.errors import BaseMismatch
from skydraft.types import DraftBlock, FinishReason, Prompt, Verdict


class Committed(Protocol):
    """What may be known of a generation by those who must not change it."""

    @property
    def generated(self) -> TokenIds:
        """Committed tokens, the prompt left out, [base]."""

    @property
    def num_seen(self) -> int:
        """How many of them the target knows."""


class Context:
    """Prompt and committed tokens of one generation, and how far the target has seen them."""

    def __init__(self, prompt: Prompt) -> None:
        self._tokens = TokenBuffer(prompt.token_ids)
        self._prompt_len = len(prompt.token_ids)
        self._num_seen = 0
        self._finish: FinishReason | None = None

    @property
    def base(self) -> int:
        """How many generated tokens are committed."""
        return len(self._tokens) - self._prompt_len

    @property
    def token_ids(self) -> TokenIds:
        """Read-only view of prompt and committed tokens, [prompt length + base]."""
        return self._tokens.view

    @property
    def generated(self) -> TokenIds:
        """Read-only view of the committed tokens, the prompt left out, [base]."""
        return self._tokens.view[self._prompt_len :]

    @property
    def num_seen(self) -> int:
        """How many generated tokens the target knows: all up to its last verdict."""
        return self._num_seen

    @property
    def catch_up(self) -> tuple[int, ...]:
        """Tokens committed by skips since the last verdict."""
        return tuple(self.generated[self._num_seen :].tolist())

    @property
    def finish(self) -> FinishReason | None:
        """Why the generation ended, or None while it goes on."""
        return self._finish

    def commit_skip(self, block: DraftBlock, finish: FinishReason | None) -> tuple[int, ...]:
        """Commit a whole block unverified. Raises BaseMismatch."""
        return self._commit(block.base, block.token_ids, finish)

    def commit_verdict(self, block: DraftBlock, verdict: Verdict) -> tuple[int, ...]:
        """Commit the accepted tokens of a block and the target's own token. Raises BaseMismatch."""
        if verdict.base != block.base:
            raise BaseMismatch(verdict.base, block.base)
        committed = self._commit(block.base, verdict.commits(block), verdict.finish)
        self._num_seen = self.base
        return committed

    def interrupt(self) -> None:
        """End the generation from outside, with what is committed so far."""
        self._finish = self._finish or "interrupted"

    def _commit(self, base: int, token_ids: tuple[int, ...], finish: FinishReason | None) -> tuple[int, ...]:
        if base != self.base:
            raise BaseMismatch(base, self.base)
        self._tokens.extend(token_ids)
        self._finish = finish or self._finish  # an interrupt during the round stays
        return token_ids
