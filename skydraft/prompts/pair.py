"""One request as both sides read it: the tokens of its messages, and its speech, for the draft model and the target."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from skydraft.engines.base import Engine
from skydraft.engines.vocab import Vocab
from skydraft.prompts.audio import Audio
from skydraft.prompts.chat_template import render
from skydraft.prompts.messages import Message
from skydraft.types import Prompt

ShareAudio = Literal["features", "none"]


@dataclass(frozen=True, slots=True)
class PromptPair:
    """One prompt for each side. They differ where the target never hears the audio, or hears it rounded."""

    edge: Prompt
    target: Prompt
    features_ms: float = field(default=0.0, compare=False)  # making features of the speech


def prompt_ids(
    vocab: Vocab, messages: Seq[Message], *, raw: bool = False, audio_ids: tuple[int, ...] = (), audio_turn: int = -1,
    tools: Seq[Any] = (),
) -> tuple[int, ...]:  # fmt: skip
    """The tokens that ask for an answer to `messages`: through the chat template, or their bare text where `raw`.

    `audio_ids` come before the words of the message number `audio_turn`; `tools` are for the template.
    """
    heard = list(messages)
    if audio_ids:
        words = heard[audio_turn].content
        heard[audio_turn] = replace(heard[audio_turn], content=vocab.written(audio_ids) + words)
    text = vocab.bos_text + heard[-1].content if raw else render(vocab, heard, tools)
    return vocab.encode(text)


def read_prompt(
    reader: Engine, messages: Seq[Message], audio: Audio | None = None, *, raw: bool = False,
    share: ShareAudio = "features", audio_turn: int = -1, tools: Seq[Any] = (),
) -> PromptPair:  # fmt: skip
    """What both sides read of `messages` and, where given, speech, whose features `reader` makes.

    It is heard with the message number `audio_turn`. With `share` "none" the target reads the words alone. Raises
    PromptError where `reader` takes no audio.
    """

    def ids(audio_ids: tuple[int, ...] = ()) -> tuple[int, ...]:
        return prompt_ids(reader.vocab, messages, raw=raw, audio_ids=audio_ids, audio_turn=audio_turn, tools=tools)

    if audio is None:
        prompt = Prompt(ids())
        return PromptPair(prompt, prompt)
    began = time.perf_counter()
    media = reader.media(audio.samples)
    features_ms = (time.perf_counter() - began) * 1e3
    heard = ids(reader.audio_tokens(media))
    # Rounded in one process too, so that a verdict does not depend on where the target is.
    target = Prompt(heard, media.rounded()) if share == "features" else Prompt(ids())
    return PromptPair(Prompt(heard, media), target, features_ms)
