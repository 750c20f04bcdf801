"""What is asked: one prompt, perhaps with speech, as the draft model reads it and as the target does."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from skydraft.decoding.chat import render_prompt
from skydraft.engines.base import Engine
from skydraft.engines.vocab import Vocab
from skydraft.types import Media

ShareAudio = Literal["features", "none"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens that one side reads, chat template included, and what their audio tokens stand for."""

    token_ids: tuple[int, ...]
    media: Media | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """One question for both sides. They differ where the target never hears the audio, or hears it rounded."""

    edge: Prompt
    target: Prompt
    features_ms: float = field(default=0.0, compare=False)  # making features of the speech


def plain(token_ids: tuple[int, ...]) -> Question:
    """The question of a bare prompt, the same for both sides."""
    prompt = Prompt(token_ids)
    return Question(prompt, prompt)


def prompt_ids(
    vocab: Vocab, prompt: str, *, system: str | None = None, raw: bool = False, audio_ids: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """The tokens that ask for an answer to `prompt`: through the chat template, or as it is where `raw`.

    `audio_ids` come before its words.
    """
    text = vocab.written(audio_ids) + prompt
    return vocab.encode(vocab.bos_text + text if raw else render_prompt(vocab, text, system))


def ask(
    ears: Engine,
    samples: npt.NDArray[np.float32] | None,
    prompt: str,
    *,
    system: str | None = None,
    raw: bool = False,
    share: ShareAudio = "features",
) -> Question:
    """The question about `prompt` and, where given, speech [num_samples] at 16 kHz, whose features `ears` makes.

    With `share` "none" the target reads the words alone. Raises PromptError where `ears` takes no audio.
    """
    if samples is None:
        return plain(prompt_ids(ears.vocab, prompt, system=system, raw=raw))
    began = time.perf_counter()
    media = ears.media(samples)
    features_ms = (time.perf_counter() - began) * 1e3
    heard = prompt_ids(ears.vocab, prompt, system=system, raw=raw, audio_ids=ears.audio_tokens(media))
    if share == "features":
        # Rounded in one process too, so that a verdict does not depend on where the target is.
        return Question(Prompt(heard, media), Prompt(heard, media.rounded()), features_ms)
    words = Prompt(prompt_ids(ears.vocab, prompt, system=system, raw=raw))
    return Question(Prompt(heard, media), words, features_ms)
