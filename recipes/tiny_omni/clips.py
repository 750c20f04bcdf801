"""Clips of Mandarin speech with known attributes, spoken by espeak-ng.

What the classes mean, all drawn evenly within their range: rate is the speed asked of espeak-ng; pitch is relative
to the voice (its 0 to 99 setting), so a high man is not a low woman; loudness is the absolute level of the voiced
part; `many` pauses are breaks between all words, `few` are none. Ranges of neighbouring classes do not touch.
"""

import io
import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recipes.tiny_omni.attributes import Attributes, draw
from recipes.tiny_omni.captions import caption
from recipes.tiny_omni.sentences import draw_sentence

SAMPLE_RATE = 16_000
_NUM_SPEAKING = 2  # espeak-ng processes at a time
NUM_REFERENCES = 3
DEMO = {
    "demo-fast-loud-woman": Attributes("female", "fast", "high", "loud", "few"),
    "demo-slow-soft-man": Attributes("male", "slow", "low", "soft", "few"),
    "demo-halting-man": Attributes("male", "medium", "high", "medium", "many"),
}

_VOICES = {"male": ("cmn", "cmn+m1", "cmn+m2", "cmn+m3"), "female": ("cmn+f1", "cmn+f2", "cmn+f3", "cmn+f4", "cmn+f5")}
_WORDS_PER_MINUTE = {"slow": (155, 172), "medium": (235, 260), "fast": (400, 440)}
_PITCH = {"low": (4, 12), "medium": (56, 64), "high": (92, 99)}
_LEVEL_DBFS = {"soft": (-45.0, -41.0), "medium": (-33.0, -29.0), "loud": (-22.0, -19.0)}
_NUM_WORDS = {"slow": (3, 3), "medium": (3, 4), "fast": (4, 5)}
_BREAK_MS = (170, 290)
_MARGIN_S = (0.04, 0.12)  # silence before and after the speech
_AUDIBLE = 0.01  # of the peak: below it is silence, which counts neither for trimming nor for the level

Samples = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Clip:
    """A clip and its truth. `samples` are mono in [-1, 1] at 16 kHz."""

    id: str
    text: str
    attributes: Attributes
    samples: Samples


def make_clip(seed: int, index: int, *, held_out: bool = False, attributes: Attributes | None = None) -> Clip:
    """Clip `index` of the set `seed`: a pure function of the arguments, for one version of espeak-ng."""
    rng = np.random.default_rng([seed, index])
    drawn = draw(rng)
    attributes = attributes or drawn
    words = draw_sentence(rng, _between(rng, _NUM_WORDS[attributes.rate]), held_out=held_out)
    speech = _speak(words, attributes, rng)
    return Clip(f"{seed}-{index:05d}", "".join(words), attributes, _place(speech, attributes, rng))


def make_clips(count: int, seed: int, *, start: int = 0, held_out: bool = False) -> Iterator[Clip]:
    """Clips `start` to `count` - 1 of the set `seed`, in order. espeak-ng runs in processes of its own meanwhile."""
    with ThreadPoolExecutor(_NUM_SPEAKING) as pool:
        yield from pool.map(lambda index: make_clip(seed, index, held_out=held_out), range(start, count))


def make_held_out(count: int, seed: int) -> Iterator[Clip]:
    """A held-out set. It starts with the demo clips, which have names and chosen attributes."""
    for index, (name, attributes) in enumerate(DEMO.items()):
        yield replace(make_clip(seed, index, held_out=True, attributes=attributes), id=name)
    yield from make_clips(count, seed, start=len(DEMO), held_out=True)


def write_clips(clips: Iterator[Clip], folder: Path) -> int:
    """Write flac files and `truth.jsonl` into `folder`; the number of clips is returned."""
    import soundfile

    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, clip in enumerate(clips):
        audio = f"{clip.id}.flac"
        soundfile.write(folder / audio, clip.samples, SAMPLE_RATE, subtype="PCM_16")
        lines.append(json.dumps(truth(clip, audio, number), ensure_ascii=False))
    (folder / "truth.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


def truth(clip: Clip, audio: str, number: int) -> dict[str, Any]:
    """The line of `truth.jsonl` for a clip; `audio` is its file, relative to the folder."""
    references = [caption(clip.attributes, number * NUM_REFERENCES + offset) for offset in range(NUM_REFERENCES)]
    return {"id": clip.id, "audio": audio, "text": clip.text, **clip.attributes.as_dict(), "references": references}


def _speak(words: tuple[str, ...], attributes: Attributes, rng: np.random.Generator) -> Samples:
    """Speech as espeak-ng gives it, at 16 kHz."""
    import soundfile
    import soxr

    breaks = [f'<break time="{_between(rng, _BREAK_MS)}ms"/>' if attributes.pauses == "many" else "" for _ in words]
    ssml = "".join(part for pair in zip(words, [*breaks[:-1], ""], strict=True) for part in pair)
    speed, pitch = _between(rng, _WORDS_PER_MINUTE[attributes.rate]), _between(rng, _PITCH[attributes.pitch])
    command = ["espeak-ng", "-m", "-v", str(rng.choice(_VOICES[attributes.speaker]))]
    command += ["-s", str(speed), "-p", str(pitch), "--stdin", "--stdout"]
    wave = subprocess.run(command, input=ssml.encode(), capture_output=True, check=True).stdout
    samples, rate = soundfile.read(io.BytesIO(wave), dtype="float32")
    return np.asarray(soxr.resample(samples, rate, SAMPLE_RATE), np.float32)


def _place(speech: Samples, attributes: Attributes, rng: np.random.Generator) -> Samples:
    """The speech trimmed, put between short silences, and brought to its level."""
    audible = np.flatnonzero(np.abs(speech) > _AUDIBLE * np.abs(speech).max())
    speech = speech[audible[0] : audible[-1] + 1]
    level = 10 ** (rng.uniform(*_LEVEL_DBFS[attributes.loudness]) / 20)
    voiced = speech[np.abs(speech) > _AUDIBLE * np.abs(speech).max()]
    speech = speech * np.float32(level / np.sqrt(np.mean(voiced**2)))
    before, after = (int(SAMPLE_RATE * rng.uniform(*_MARGIN_S)) for _ in range(2))
    return np.clip(np.pad(speech, (before, after)), -1, 1)


def _between(rng: np.random.Generator, ends: tuple[int, int]) -> int:
    return int(rng.integers(ends[0], ends[1], endpoint=True))
