"""A toy that hears: its logits depend on the features of a recording, and it counts how often it encoded one."""

import zlib
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from skydraft.engines.base import Sequence
from skydraft.engines.toy import ToyEngine
from skydraft.engines.vocab import Rows, TokenIds
from skydraft.errors import PromptError
from skydraft.types import Media, Recordings, Reuse

from .. import toys

NUM_MELS = 4
_FRAME = 160  # samples
_NUM_TONES = 11
AUDIO_ID = 2  # a character of the toy vocabulary stands for audio here


class Heard(list[tuple[int, int]]):
    """The KV cache of a toy, and what it heard."""

    tone = 0


class HearingToy(ToyEngine):
    """The toy of a seed; `drift` makes it a poorer one. What it hears shifts every row by one of eleven tables."""

    takes_audio = True

    def __init__(self, seed: int, drift: float = 0.0, context_len: int = 4096) -> None:
        last, named = toys.tables(seed, drift)
        super().__init__(toys.VOCAB, last, context_len=context_len, **named)
        self._tones = np.random.default_rng(seed).normal(0, 3, (_NUM_TONES, self.vocab.size)).astype(np.float32)
        self.num_encoded = 0

    def media(self, samples: npt.NDArray[np.float32]) -> Media:
        frames = samples[: len(samples) // _FRAME * _FRAME].reshape(-1, _FRAME)
        return Media(np.abs(np.stack([frames[:, start::NUM_MELS].sum(1) for start in range(NUM_MELS)])))

    def audio_tokens(self, media: Media) -> tuple[int, ...]:
        return (AUDIO_ID,) * media.num_tokens

    def check_media(self, prompt: Seq[int] | TokenIds, media: Recordings) -> None:
        wanted = sum(each.num_tokens for each in media)
        if int((np.asarray(prompt) == AUDIO_ID).sum()) < wanted:
            raise PromptError("too few audio tokens")

    def begin(self, prompt: Seq[int] | TokenIds, media: Recordings = (), reuse: Reuse | None = None) -> Sequence:
        sequence = super().begin(prompt, media, reuse)
        if media:
            self.num_encoded += len(media)
            heard = b"".join(each.features.tobytes() for each in media)
            sequence.slot.tone = 1 + zlib.crc32(heard) % (_NUM_TONES - 1)
        return sequence

    def allocate(self, num_tokens: int) -> Heard:
        return Heard()

    def forward(self, feeds: Seq[tuple[Sequence, Seq[int] | TokenIds]], *, want_logits: bool) -> list[Rows]:
        rows = super().forward(feeds, want_logits=want_logits)
        tones = [self._tones[sequence.slot.tone] for sequence, _ in feeds]
        return [found + tone for found, tone in zip(rows, tones, strict=True)] if want_logits else rows


def samples(seed: int, num_frames: int = 12) -> npt.NDArray[np.float32]:
    """Some sound."""
    return np.random.default_rng(seed).normal(0, 0.1, num_frames * _FRAME).astype(np.float32)
