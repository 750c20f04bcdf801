"""The sections about speech, and a recording's figures, such as its length and the bytes that left the device."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skydraft.cli.options.decoding import GateChoice
from skydraft.cli.options.pair import CloudChoice
from skydraft.cli.options.sections import option, section
from skydraft.decoding.generation import Generation
from skydraft.errors import OptionError
from skydraft.prompts.audio import Audio, load_audio
from skydraft.prompts.pair import ShareAudio

STYLE = "zh-short"


@dataclass(frozen=True, slots=True)
class Recording:
    path: Path
    audio: Audio
    load_ms: float

    def figures(self, generation: Generation, share: ShareAudio) -> dict[str, Any]:
        """`bytes_shared` left this device; `preprocess_ms` is the time of reading, resampling and features."""
        prompts = generation.request.prompts
        return {
            "path": str(self.path), "duration_s": round(self.audio.duration_s, 3),
            "num_audio_tokens": sum(media.num_tokens for media in prompts.edge.media or prompts.target.media),
            "share": share, "bytes_shared": generation.stats.shared_bytes,
            "preprocess_ms": round(self.load_ms + prompts.features_ms, 3),
        }  # fmt: skip


def audio_line(figures: dict[str, Any]) -> str:
    shared = figures["bytes_shared"]
    sent = f"{shared:,} bytes of features left this device" if shared else "features stayed on this device"
    size = f"{figures['duration_s']:.2f} s in {figures['num_audio_tokens']} tokens"
    return f"audio: {size}, read in {figures['preprocess_ms']:.0f} ms; {sent}"


@dataclass(frozen=True, slots=True)
class SpeechChoice:
    """The part of recordings that the target gets; `audio` is one recording."""

    share_audio: ShareAudio | None
    audio: Path | None = None

    def share(self, gate: GateChoice, cloud: CloudChoice) -> ShareAudio:
        """Return the part of a recording that the target gets. Raises OptionError if the user must allow it first."""
        if self.share_audio is None and cloud.address and gate.plan.verifies:
            hint = "Allow it with --share-audio features, or use --mode edge."
            raise OptionError("With --cloud the features of each recording leave this device.", hint=hint)
        return self.share_audio or "features"

    def read(self, path: Path) -> Recording:
        """Read and resample a file. Raises PromptError."""
        began = time.perf_counter()
        audio = load_audio(path)
        return Recording(path, audio, (time.perf_counter() - began) * 1e3)


_SHARE = option("--share-audio", None, "Part of the recording that the target gets: features, or none (only with "
                "--mode edge). Default: features; with --cloud you must allow it, because features leave this device.",
                type=ShareAudio)  # fmt: skip
audio_section = section("speech", "Speech", SpeechChoice, [
    option("--audio", "FILE", "Recording (wav, flac, mp3, ogg) that PROMPT is about; the default style is then "
           f"{STYLE}.", type=Path),
    _SHARE,
])  # fmt: skip
speech_section = section("speech", "Speech", SpeechChoice, [_SHARE])
