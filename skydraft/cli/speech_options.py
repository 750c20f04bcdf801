"""The sections about speech, and what is said of a recording: how long it was, what left the device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import click

from skydraft.cli.cloud_options import CloudChoice
from skydraft.cli.options import GateChoice
from skydraft.cli.sections import Section, option
from skydraft.decoding.generation import Generation
from skydraft.errors import OptionError
from skydraft.prompts.audio import MAX_DURATION_S, Audio, load_audio
from skydraft.prompts.messages import Message
from skydraft.prompts.pair import ShareAudio

STYLE = "zh-short"


@dataclass(frozen=True, slots=True)
class Speech:
    """One recording and what was done with it. `bytes_shared` left this device; `preprocess_ms` is reading,
    resampling and features."""

    path: str
    duration_s: float
    num_audio_tokens: int
    share: ShareAudio
    bytes_shared: int
    preprocess_ms: float

    def __str__(self) -> str:
        kept = "the target judged from the words alone" if self.share == "none" else "features stayed on this device"
        sent = f"{self.bytes_shared:,} bytes of features left this device" if self.bytes_shared else kept
        size = f"{self.duration_s:.2f} s in {self.num_audio_tokens} tokens"
        return f"audio: {size}, read in {self.preprocess_ms:.0f} ms; {sent}"


@dataclass(frozen=True, slots=True)
class Recording:
    """A file that was read, and how long that took."""

    path: Path
    audio: Audio
    load_ms: float

    def used(self, generation: Generation, share: ShareAudio) -> Speech:
        """What became of it in a generation."""
        prompts = generation.prompts
        heard = prompts.edge.media or prompts.target.media
        return Speech(
            str(self.path),
            round(self.audio.duration_s, 3),
            sum(media.num_tokens for media in heard),
            share,
            generation.stats.shared_bytes,
            round(self.load_ms + prompts.features_ms, 3),
        )


@dataclass(frozen=True, slots=True)
class SpeechChoice:
    """How recordings are treated: what the target gets of them, how long they may be; `audio` is one to be heard."""

    share_audio: ShareAudio | None
    max_audio_s: float | None
    audio: Path | None = None

    def share(self, gate: GateChoice, cloud: CloudChoice) -> ShareAudio:
        """What the target gets of a recording. Raises OptionError where the user has to decide and did not."""
        if self.share_audio and not gate.plan.verifies:
            raise OptionError("--share-audio says what the target gets; here the draft model works alone.")
        if self.share_audio is None and cloud.address and gate.plan.verifies:
            raise OptionError(
                "With --cloud, say what may leave this device of a recording.",
                hint="Give --share-audio features, or --share-audio none.",
            )
        return self.share_audio or "features"

    def is_heard(self, messages: tuple[Message, ...]) -> bool:
        """Whether somebody speaks in a conversation. Raises OptionError for options about speech where nobody does."""
        has_audio = any(message.audio for message in messages)
        given = {"--share-audio": self.share_audio, "--max-audio-s": self.max_audio_s}
        if not has_audio and (useless := [option for option, value in given.items() if value is not None]):
            raise OptionError(
                f"{useless[0]} is about a recording, and none was named.", hint="Name one with --audio FILE."
            )
        return has_audio

    def read(self, path: Path) -> Recording:
        """Read and resample a file. Raises PromptError."""
        began = time.perf_counter()
        audio = load_audio(path, max_duration_s=MAX_DURATION_S if self.max_audio_s is None else self.max_audio_s)
        return Recording(path, audio, (time.perf_counter() - began) * 1e3)


_SPEECH = [
    option(
        "--share-audio", None, "What the target gets of the recording: its features, or none, so that it judges from "
        "the words alone (default: features; with --cloud you have to choose, because they leave this device).",
        type=click.Choice(get_args(ShareAudio)),
    ),
    option(
        "--max-audio-s", "S", f"Refuse recordings of more than S seconds (default: {MAX_DURATION_S:g}).", type=float
    ),
]  # fmt: skip
_AUDIO = option(
    "--audio", "FILE", f"Recording (wav, flac, mp3, ogg) that PROMPT is about; the default style is {STYLE} then.",
    type=Path,
)  # fmt: skip

audio_section = Section("speech", "Speech", SpeechChoice, [_AUDIO, *_SPEECH])
speech_section = Section("speech", "Speech", SpeechChoice, _SPEECH)
