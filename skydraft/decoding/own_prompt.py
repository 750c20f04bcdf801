"""A target that is asked in other words than the draft model: it never hears the audio, say.

Generated tokens are the same on both sides, but stand at other places: bases are moved by what the prompts differ in
length. Nothing is kept twice; the other prompt is looked at through the one context there is.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from skydraft.decoding.context import Context
from skydraft.decoding.verification import Verifier
from skydraft.engines.vocab import TokenIds
from skydraft.types import DraftBlock, Media, Verdict


class OtherPrompt:
    """A read-only view of a context as if it had begun with another prompt."""

    def __init__(self, context: Context, prompt_ids: Seq[int], media: Media | None = None) -> None:
        self._context = context
        self._prompt_ids = np.array(prompt_ids, np.int32)
        self.prompt_len = len(prompt_ids)
        self.media = media

    @property
    def shift(self) -> int:
        """How much longer this prompt is than the context's own; may be negative."""
        return self.prompt_len - self._context.prompt_len

    @property
    def token_ids(self) -> TokenIds:
        """This prompt and the committed tokens, [len]."""
        return np.append(self._prompt_ids, self._context.token_ids[self._context.prompt_len :])

    @property
    def seen_len(self) -> int:
        """How many of these tokens the target knows."""
        return self._context.seen_len + self.shift


class ShiftedVerifier:
    """A verifier whose bases count another prompt, as one that counts the context's own."""

    def __init__(self, verifier: Verifier, shift: int) -> None:
        self._verifier = verifier
        self._shift = shift

    def verify(self, block: DraftBlock, catch_up: Seq[int]) -> Verdict:
        """As the verifier behind it does."""
        verdict = self._verifier.verify(replace(block, base=block.base + self._shift), catch_up)
        return replace(verdict, base=verdict.base - self._shift)

    @property
    def shared_bytes(self) -> int:
        """As of the verifier behind it."""
        return self._verifier.shared_bytes

    def close(self) -> None:
        """Free what the verifier behind it holds."""
        self._verifier.close()
