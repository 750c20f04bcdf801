"""The options about speech, and what is said of it: how long it was, what left the device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from skydraft.api import Generation
from skydraft.cli.options import Command, add_options
from skydraft.decoding.plan import Plan
from skydraft.decoding.question import ShareAudio
from skydraft.engines.audio import MAX_DURATION_S, Audio, load_audio
from skydraft.errors import OptionError

STYLE = "zh-short"

_SPEECH = [
    click.option(
        "--share-audio",
        type=click.Choice(["features", "none"]),
        help="What the target gets of the audio: its features once, or none (it judges from the words alone). With "
        "--cloud it has to be said, since it is what leaves this device; in one process the default is features.",
    ),
    click.option(
        "--max-audio-s",
        type=click.FloatRange(min=0, min_open=True),
        default=MAX_DURATION_S,
        show_default=True,
        metavar="S",
        help="Longest recording.",
    ),
]


@dataclass(frozen=True, slots=True)
class Speech:
    """One recording and what was done with it. `bytes_shared` left this device; `preprocess_ms` is reading,
    resampling and features."""

    path: str
    duration_s: float
    num_audio_tokens: int
    share: str
    bytes_shared: int
    preprocess_ms: float


@dataclass(frozen=True, slots=True)
class Recording:
    """A file that was read, and how long that took."""

    path: Path
    audio: Audio
    load_ms: float

    def used(self, generation: Generation, share: ShareAudio) -> Speech:
        """What became of it in a generation."""
        question = generation.question
        heard = question.edge.media or question.target.media
        assert heard is not None  # a generation with audio has media on one side
        return Speech(
            str(self.path),
            round(self.audio.duration_s, 3),
            heard.num_tokens,
            share,
            generation.shared_bytes,
            round(self.load_ms + question.features_ms, 3),
        )


def speech_options(command: Command) -> Command:
    """Add the options about recordings."""
    return add_options(_SPEECH, command)


def read_recording(path: Path, max_duration_s: float) -> Recording:
    """Read and resample a file. Raises PromptError."""
    began = time.perf_counter()
    audio = load_audio(path, max_duration_s=max_duration_s)
    return Recording(path, audio, (time.perf_counter() - began) * 1e3)


def take_share(given: dict[str, Any], plan: Plan, *, is_remote: bool) -> ShareAudio:
    """What the target gets of the audio. Raises OptionError where it has to be said and was not."""
    share: ShareAudio | None = given.pop("share_audio")
    if share is not None and not plan.verifies:
        raise OptionError("--share-audio says what the target gets; here the draft model works alone.")
    if share is None and is_remote and plan.verifies:
        raise OptionError(
            "With --cloud it has to be said what of the audio may leave this device.",
            hint="Give --share-audio features, or --share-audio none.",
        )
    return share or "features"


def speech_line(speech: Speech) -> str:
    """One line about it."""
    kept = "the target judged from the words alone" if speech.share == "none" else "features stayed on this device"
    sent = f"{speech.bytes_shared:,} bytes of features left this device" if speech.bytes_shared else kept
    size = f"{speech.duration_s:.2f} s in {speech.num_audio_tokens} tokens"
    return f"audio: {size}, read in {speech.preprocess_ms:.0f} ms; {sent}"
