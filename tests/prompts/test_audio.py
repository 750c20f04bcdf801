"""Recordings as they come: any rate, any channels, and everything that is no recording."""

import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from skydraft.errors import MissingDependency, PromptError
from skydraft.prompts.audio import load_audio
from skydraft.types import SAMPLE_RATE

soundfile = pytest.importorskip("soundfile")
soxr = pytest.importorskip("soxr")

TONE_HZ = 440


def tone(duration_s: float, rate: int = SAMPLE_RATE, *, peak: float = 0.5) -> np.ndarray:
    time = np.arange(round(duration_s * rate)) / rate
    return (peak * np.sin(2 * np.pi * TONE_HZ * time)).astype(np.float32)


def save(path: Path, samples: np.ndarray, rate: int = SAMPLE_RATE, **given: str) -> Path:
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    with soundfile.SoundFile(path, "w", rate, channels, **given) as file:
        for start in range(0, len(samples), rate):  # by seconds: libsndfile crashes on long blocks of Vorbis
            file.write(samples[start : start + rate])
    return path


@pytest.mark.parametrize("suffix", ["wav", "flac", "mp3", "ogg"])
@pytest.mark.parametrize("rate", [8000, 16_000, 22_050, 44_100, 48_000])
def test_any_format_and_rate(suffix: str, rate: int, tmp_path: Path) -> None:
    audio = load_audio(save(tmp_path / f"a.{suffix}", tone(1.5, rate), rate))
    assert audio.samples.dtype == np.float32 and audio.samples.ndim == 1
    assert audio.duration_s == pytest.approx(1.5, abs=0.08)  # an encoder of MP3 adds some silence
    spectrum = np.abs(np.fft.rfft(audio.samples))
    assert spectrum.argmax() / audio.duration_s == pytest.approx(TONE_HZ, abs=1)
    assert np.abs(audio.samples[4000:-4000]).max() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("channels", [2, 6, 8, 24])
def test_channels_are_averaged(channels: int, tmp_path: Path) -> None:
    each = np.stack([tone(0.5) * np.float32(weight) for weight in range(channels)], axis=1) / np.float32(channels)
    audio = load_audio(save(tmp_path / "a.wav", each, subtype="FLOAT"))
    assert np.abs(audio.samples - each.mean(axis=1)).max() < 1e-6


@pytest.mark.parametrize(("rate", "channels", "says"), [
    (8000, 1, "lasts 2 s"), (655_350, 1, "has 655350 samples a second"), (48_000, 8, "in 8 channels"),
])  # fmt: skip
def test_too_much_is_told(rate: int, channels: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the header: a second is a few kilobytes of FLAC, however many samples that stands for."""
    seconds = 2 if rate == 8000 else 1
    path = save(tmp_path / "a.flac", np.full((seconds * rate, channels), 0.5, np.float32), rate)
    monkeypatch.setattr(soundfile.SoundFile, "read", lambda *_, **__: pytest.fail("it was decoded"))
    monkeypatch.setattr("skydraft.prompts.audio.MAX_DURATION_S", 1.0)
    with pytest.raises(PromptError, match=says):
        load_audio(path)


def test_the_longest_recording_takes_the_memory_of_its_samples(tmp_path: Path) -> None:
    path = save(tmp_path / "a.flac", np.full((4_800_000, 2), 0.5, np.float32), 48_000)
    tracemalloc.start()
    try:
        audio = load_audio(path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2.5 * audio.samples.nbytes + (8 << 20)  # the samples alone were 38 MB before


def test_blocks_leave_no_mark(tmp_path: Path) -> None:
    rate = 22_050
    noise = np.random.default_rng(0).normal(0, 0.1, rate * 40).astype(np.float32)  # several blocks
    path = save(tmp_path / "a.wav", noise, rate, subtype="FLOAT")
    assert np.array_equal(load_audio(path).samples, soxr.resample(noise, rate, SAMPLE_RATE))


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def cut_off(path: Path) -> Path:
    whole = save(path, np.random.default_rng(0).normal(0, 0.1, 48_000)).read_bytes()
    return written(path, whole[: len(whole) // 2])


WRONG: list[tuple[str, Callable[[Path], Path], str]] = [
    ("missing", lambda folder: folder / "none.wav", "There is no readable file"),
    ("text", lambda folder: written(folder / "a.wav", b"hello " * 100), "read as audio: Format not recognised"),
    ("a cut off FLAC", lambda folder: cut_off(folder / "a.flac"), "cannot be read as audio"),
    ("too short", lambda folder: save(folder / "a.wav", tone(0.09)), r"lasts 0\.09 s; 0\.1 to 300 s are read"),
    ("AIFF", lambda folder: save(folder / "a.wav", tone(0.5), format="AIFF"), "read as audio: it is AIFF"),
    ("hiss", lambda folder: save(folder / "a.wav", tone(0.5, peak=2e-4), subtype="FLOAT"), "is silent"),
    ("opposite channels", lambda folder: save(folder / "a.wav", np.stack([tone(1), -tone(1)], 1)), "is silent"),
    ("NaN", lambda folder: save(folder / "a.wav", tone(0.5) - np.float32("nan"), subtype="FLOAT"), "not numbers"),
]


@pytest.mark.parametrize(("make", "message"), [pytest.param(*case[1:], id=case[0]) for case in WRONG])
def test_what_is_no_recording(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=message) as caught:
        load_audio(make(tmp_path))
    assert "\n" not in str(caught.value) and caught.value.hint


def test_without_a_library_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soxr", None)
    with pytest.raises(MissingDependency, match=r"pip install 'skydraft\[omni\]'"):
        load_audio(save(tmp_path / "a.wav", tone(0.5)))
