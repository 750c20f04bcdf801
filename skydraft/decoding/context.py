"""What is final: the prompt and the committed tokens. It only grows, and only from where it ends."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from skydraft.engines.base import TokenBuffer
from skydraft.engines.vocab import TokenIds
from skydraft.errors import BaseMismatch
from skydraft.types import DraftBlock, FinishReason, Media, Verdict


class Committed(Protocol):
    """What may be known of a generation by who must not change it."""

    @property
    def token_ids(self) -> TokenIds:
        """Prompt and committed tokens, [len]."""

    @property
    def prompt_len(self) -> int:
        """Length of the prompt."""

    @property
    def seen_len(self) -> int:
        """How many committed tokens the target knows."""

    @property
    def media(self) -> Media | None:
        """What the audio tokens of the prompt stand for."""


class Context:
    """Committed tokens of one generation and how far the target has seen them."""

    def __init__(self, prompt: Seq[int], media: Media | None = None) -> None:
        self._tokens = TokenBuffer(prompt)
        self._media = media
        self._prompt_len = len(prompt)
        self._seen_len = len(prompt)
        self._finish: FinishReason | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def prompt_len(self) -> int:
        """Length of the prompt."""
        return self._prompt_len

    @property
    def media(self) -> Media | None:
        """What the audio tokens of the prompt stand for, on this side."""
        return self._media

    @property
    def token_ids(self) -> TokenIds:
        """Read-only view of prompt and committed tokens, [len]."""
        return self._tokens.view

    @property
    def seen_len(self) -> int:
        """How many committed tokens the target knows: all up to its last verdict."""
        return self._seen_len

    @property
    def catch_up(self) -> tuple[int, ...]:
        """Tokens committed by skips since the last verdict."""
        return tuple(self.token_ids[self._seen_len :].tolist())

    @property
    def finish(self) -> FinishReason | None:
        """Why the generation ended, or None while it goes on."""
        return self._finish

    def commit_skip(self, block: DraftBlock, finish: FinishReason | None) -> tuple[int, ...]:
        """Commit a whole block unverified. Raises BaseMismatch."""
        return self._commit(block.base, block.token_ids, finish)

    def commit_verdict(self, block: DraftBlock, verdict: Verdict) -> tuple[int, ...]:
        """Commit the accepted tokens of a block and the target's own token. Raises BaseMismatch."""
        tail = () if verdict.token_id is None else (verdict.token_id,)
        if verdict.base != block.base:
            raise BaseMismatch(verdict.base, block.base)
        committed = self._commit(block.base, block.token_ids[: verdict.num_accepted] + tail, verdict.finish)
        self._seen_len = len(self)
        return committed

    def interrupt(self) -> None:
        """End the generation from outside, with what is committed so far."""
        self._finish = self._finish or "interrupted"

    def _commit(self, base: int, token_ids: tuple[int, ...], finish: FinishReason | None) -> tuple[int, ...]:
        if base != len(self):
            raise BaseMismatch(base, len(self))
        self._tokens.extend(token_ids)
        self._finish = finish or self._finish  # an interrupt during the round stays
        return token_ids
