"""The sections about speech, and the figures of a recording: its length, and the bytes that left the device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from skydraft.cli.options import GateChoice
from skydraft.cli.pair_options import CloudChoice
from skydraft.cli.sections import Section, option
from skydraft.decoding.generation import Generation
from skydraft.errors import OptionError
from skydraft.prompts.audio import MAX_DURATION_S, Audio, load_audio
from skydraft.prompts.messages import Message
from skydraft.prompts.pair import ShareAudio

STYLE = "zh-short"


@dataclass(frozen=True, slots=True)
class Speech:
    """The figures of one recording. `bytes_shared` left this device; `preprocess_ms` is the time of reading,
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
    """The content of a file, and the time of reading it."""

    path: Path
    audio: Audio
    load_ms: float

    def used(self, generation: Generation, share: ShareAudio) -> Speech:
        """The figures of the recording in a generation."""
        prompts = generation.prompts
        num_tokens = sum(media.num_tokens for media in prompts.edge.media or prompts.target.media)
        duration_s, read_ms = round(self.audio.duration_s, 3), round(self.load_ms + prompts.features_ms, 3)
        return Speech(str(self.path), duration_s, num_tokens, share, generation.stats.shared_bytes, read_ms)


@dataclass(frozen=True, slots=True)
class SpeechChoice:
    """Settings for recordings: the part that the target gets, and their maximal length; `audio` is one recording."""

    share_audio: ShareAudio | None
    max_audio_s: float | None
    audio: Path | None = None

    def share(self, gate: GateChoice, cloud: CloudChoice) -> ShareAudio:
        """The part of a recording that the target gets. Raises OptionError if the user must choose and did not."""
        if self.share_audio and not gate.plan.verifies:
            raise OptionError("--share-audio does not apply here: the draft model works alone.", hint="Remove it.")
        if self.share_audio is None and cloud.address and gate.plan.verifies:
            raise OptionError(
                "With --cloud, choose which part of a recording may leave this device.",
                hint="Give --share-audio features, or --share-audio none.",
            )
        return self.share_audio or "features"

    def is_heard(self, messages: tuple[Message, ...]) -> bool:
        """Whether a conversation has a recording. Raises OptionError for options about speech without one."""
        has_audio = any(message.audio for message in messages)
        given = {"--share-audio": self.share_audio, "--max-audio-s": self.max_audio_s}
        if not has_audio and (useless := [option for option, value in given.items() if value is not None]):
            raise OptionError(
                f"{useless[0]} needs a recording, but none was given.", hint="Give one with --audio FILE."
            )
        return has_audio

    def read(self, path: Path) -> Recording:
        """Read and resample a file. Raises PromptError."""
        began = time.perf_counter()
        audio = load_audio(path, max_duration_s=MAX_DURATION_S if self.max_audio_s is None else self.max_audio_s)
        return Recording(path, audio, (time.perf_counter() - began) * 1e3)


_SPEECH = [
    option("--share-audio", None, "Part of the recording that the target gets: features, or none, so that it judges "
           "from the words alone (default: features; with --cloud you must choose, because features leave this "
           "device).", type=ShareAudio),
    option("--max-audio-s", "S", f"Refuse recordings of more than S seconds (default: {MAX_DURATION_S:g}).",
           type=float),
]  # fmt: skip
audio_section = Section("speech", "Speech", SpeechChoice, [
    option("--audio", "FILE", "Recording (wav, flac, mp3, ogg) that PROMPT is about; the default style is "
           f"{STYLE} then.", type=Path),
    *_SPEECH,
])  # fmt: skip
speech_section = Section("speech", "Speech", SpeechChoice, _SPEECH)
