"""Reads recordings as samples for engines that take speech. soundfile reads, soxr resamples."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from skydraft.errors import MissingDependency, PromptError
from skydraft.types import SAMPLE_RATE

_MIN_DURATION_S = 0.1
MAX_DURATION_S = 300.0
_FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3")  # libsndfile's names; it reads many more
_RATES = range(4_000, 192_001)  # Hz
# Most samples a second, over all channels: 48 kHz in stereo. FLAC allows 50 times as many.
_MAX_SAMPLES_S = 96_000
_BLOCK = 1 << 18  # samples to read at a time, over all channels
_SILENCE_DBFS = -70.0
_RECORD = "Give a recording as WAV, FLAC, MP3 or OGG."


@dataclass(frozen=True, slots=True, eq=False)
class Audio:
    """Speech as [num_samples] float32 at 16 kHz, mono; full scale is 1."""

    samples: npt.NDArray[np.float32]

    @property
    def duration_s(self) -> float:
        return len(self.samples) / SAMPLE_RATE


def load_library() -> tuple[Any, Any]:
    try:
        import soundfile
        import soxr
    except (ImportError, OSError) as error:  # OSError: soundfile does not find libsndfile
        message = "Audio needs soundfile and soxr; one of them is not installed or does not load."
        raise MissingDependency(message, hint="Run: pip install 'skydraft[omni]'.") from error
    return soundfile, soxr


def load_audio(path: str | Path) -> Audio:
    """Read a recording of any sample rate, in blocks; channels are averaged.

    Raises PromptError for other files, and for silent recordings, below 0.1 s, above 300 s (by the header, before
    decoding), with too many samples, or with samples that are not numbers.
    """
    try:
        with Path(path).open("rb") as file:
            return _read(file, str(path))
    except (OSError, ValueError) as error:  # ValueError: no valid file name
        raise PromptError(f"There is no readable file {str(path)[:300]}.", hint="Check its name.") from error


def audio_from_bytes(data: bytes) -> Audio:
    """`load_audio` for the bytes of a file."""
    return _read(io.BytesIO(data), "The recording")


def _read(file: BinaryIO, name: str) -> Audio:
    soundfile, soxr = load_library()
    try:
        with soundfile.SoundFile(file) as source:
            _check(name, source, source.frames)
            resampled = soxr.ResampleStream(source.samplerate, SAMPLE_RATE, 1, dtype="float32")
            parts, num_frames, peak = [], 0, 0.0
            for mono in _blocks(name, source):
                num_frames += len(mono)
                _check(name, source, max(num_frames, source.frames))  # the header may lie
                peak = max(peak, float(np.abs(mono).max()))
                parts.append(resampled.resample_chunk(mono))
            _check(name, source, num_frames)
    except (soundfile.LibsndfileError, OSError, TypeError, ValueError) as error:
        said = str(getattr(error, "error_string", None) or getattr(error, "strerror", None) or error)
        reason = (said.splitlines() or [type(error).__name__])[0].strip().rstrip(".")
        raise PromptError(f"{name} cannot be read as audio: {reason}.", hint=_RECORD) from error
    if peak < 10 ** (_SILENCE_DBFS / 20):
        message = f"{name} is silent: no sample is louder than {_SILENCE_DBFS:g} dBFS."
        raise PromptError(message, hint="Check the microphone.")
    parts.append(resampled.resample_chunk(np.empty(0, np.float32), last=True))
    return Audio(np.concatenate(parts))


def _blocks(name: str, source: Any) -> Iterator[npt.NDArray[np.float32]]:
    while len(samples := source.read(max(_BLOCK // source.channels, 1), dtype="float32", always_2d=True)):
        if not np.isfinite(samples).all():
            raise PromptError(f"{name} has samples that are not numbers.", hint="Record or convert it again.")
        yield samples.mean(axis=1, dtype=np.float32)


def _check(name: str, source: Any, num_frames: int) -> None:
    duration_s, most = num_frames / source.samplerate, int(_MAX_SAMPLES_S * MAX_DURATION_S)
    if source.format not in _FORMATS:
        raise PromptError(f"{name} cannot be read as audio: it is {source.format}.", hint=_RECORD)
    if not _MIN_DURATION_S <= duration_s <= MAX_DURATION_S:
        says = f"{name} lasts {duration_s:.3g} s; {_MIN_DURATION_S:g} to {MAX_DURATION_S:g} s are read."
        raise PromptError(says, hint="Cut it into shorter recordings, or record more.")
    if source.samplerate not in _RATES or num_frames * source.channels > most:
        says = f"{name} has {source.samplerate} samples a second in {source.channels} channels."
        raise PromptError(says, hint=f"Convert it to {_RATES[0]} to 48000 Hz in one or two channels.")
