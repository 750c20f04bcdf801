"""Reads recordings as samples for engines that take speech. soundfile reads, soxr resamples."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from skydraft.errors import MissingDependency, PromptError
from skydraft.types import SAMPLE_RATE

_MIN_DURATION_S = 0.1
MAX_DURATION_S = 300.0
_SILENCE_DBFS = -70.0
_RECORD = "Give a recording as WAV, FLAC, MP3 or OGG."


@dataclass(frozen=True, slots=True, eq=False)
class Audio:
    """Speech as [num_samples] float32 at 16 kHz, mono; full scale is 1. Rate and channels are the file's."""

    samples: npt.NDArray[np.float32]
    source_rate: int  # Hz
    source_channels: int

    @property
    def duration_s(self) -> float:
        """Seconds."""
        return len(self.samples) / SAMPLE_RATE


def load_library() -> tuple[Any, Any]:
    """The modules soundfile and soxr. Raises MissingDependency when one is not installed."""
    try:
        import soundfile
        import soxr
    except (ImportError, OSError) as error:  # OSError: soundfile does not find libsndfile
        raise MissingDependency(
            "Audio needs soundfile and soxr, and one of them is not installed or does not load.",
            hint="Run: pip install 'skydraft[audio]'.",
        ) from error
    return soundfile, soxr


def load_audio(path: str | Path, *, max_duration_s: float = MAX_DURATION_S) -> Audio:
    """Read a recording of any sample rate; channels are averaged.

    Raises PromptError for a file that is not a recording, and for a recording that is shorter than 0.1 s, longer than
    `max_duration_s` (by its header, before decoding), silent, or has samples that are not numbers.
    """
    path = Path(path)
    _check_file(path)
    return _read(path, str(path), max_duration_s)


def audio_from_bytes(data: bytes, *, max_duration_s: float = MAX_DURATION_S) -> Audio:
    """`load_audio` for a recording in memory, given as the bytes of a file."""
    return _read(io.BytesIO(data), "The recording", max_duration_s)


def _read(file: Path | io.BytesIO, name: str, max_duration_s: float) -> Audio:
    if not 0 < max_duration_s < math.inf:
        raise PromptError(f"The longest recording is a number of seconds above 0, not {max_duration_s:g}.")
    soundfile, soxr = load_library()
    try:
        with soundfile.SoundFile(file) as source:
            _check_duration(name, source.frames / source.samplerate, max_duration_s)
            rate, channels = source.samplerate, source.channels
            # [num_samples, channels]; a header may lie, so no more is decoded than was allowed
            samples = source.read(int(max_duration_s * rate) + 1, dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, OSError, TypeError, ValueError) as error:
        raise PromptError(f"{name} cannot be read as audio: {_reason(error)}.", hint=_RECORD) from error
    _check_duration(name, len(samples) / rate, max_duration_s)
    if not np.isfinite(samples).all():
        raise PromptError(f"{name} has samples that are not numbers.", hint="Record or convert it again.")
    mono = samples.mean(axis=1, dtype=np.float32)
    _check_loudness(name, mono)
    return Audio(soxr.resample(mono, rate, SAMPLE_RATE) if rate != SAMPLE_RATE else mono, rate, channels)


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise PromptError(f"{path} is a folder, not a recording.", hint="Name a file in it.")
    try:
        size = path.stat().st_size
    except OSError as error:
        raise PromptError(f"There is no readable file {path}.", hint="Check its name.") from error
    if size == 0:
        raise PromptError(f"{path} is empty.", hint=_RECORD)


def _check_duration(name: str, duration_s: float, max_duration_s: float) -> None:
    if duration_s < _MIN_DURATION_S:
        raise PromptError(
            f"{name} lasts {duration_s:.3g} s, less than {_MIN_DURATION_S} s.", hint="Give a longer recording."
        )
    if duration_s > max_duration_s:
        raise PromptError(
            f"{name} lasts more than {max_duration_s:g} s.", hint="Cut it into shorter recordings, or raise the limit."
        )


def _check_loudness(name: str, samples: npt.NDArray[np.float32]) -> None:
    if float(np.abs(samples).max()) < 10 ** (_SILENCE_DBFS / 20):
        raise PromptError(
            f"{name} is silent: no sample is louder than {_SILENCE_DBFS:g} dBFS.", hint="Check the microphone."
        )


def _reason(error: Exception) -> str:
    said = str(getattr(error, "error_string", None) or getattr(error, "strerror", None) or error)
    return (said.splitlines() or [type(error).__name__])[0].strip().rstrip(".")
