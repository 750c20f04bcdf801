"""What each kind of engine writes: the forward of a model, its KV cache, and the audio that it takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from skydraft.engines.options import RowProfile
from skydraft.engines.vocab import TokenIds, Vocab
from skydraft.errors import PromptError
from skydraft.types import Media, Recordings

if TYPE_CHECKING:
    from skydraft.engines.base import Sequence
    from skydraft.engines.rows import Rows


class Model(ABC):
    """The part of an `Engine` that differs from kind to kind. `Engine` calls it under its lock, with valid arguments.

    Subclasses set the attributes and write the five abstract methods. `fingerprint` names the weights, wherever their
    files lie; `vocab` is what `Engine.own` returned.
    """

    name: str
    fingerprint: str
    vocab: Vocab
    context_len: int
    takes_audio: bool = False
    max_batch_rows: int = 512  # most rows of a forward without logits
    max_output_rows: int = 512  # most rows of a forward with logits
    max_sequences: int = 1  # KV is kept for reuse while fewer are open
    has_kernels: bool = True  # whose path may depend on the length; then rows are compared further on in a text
    is_full_precision: bool = True  # 16 bits round differences away: rows equal in a probe need not be equal later
    _profile: RowProfile | None = None

    @property
    def is_probed(self) -> bool:
        """Whether it has a profile."""
        return self._profile is not None

    def adopt_profile(self, profile: RowProfile) -> None:
        """Set the profile that was measured."""
        self._profile = profile

    @abstractmethod
    def allocate(self) -> Any:
        """A handle for a new, empty KV sequence."""

    @abstractmethod
    def forward(self, feeds: Seq[tuple[Sequence, Seq[int] | TokenIds]], *, want_logits: bool) -> list[Rows]:
        """Run the model and write KV. On failure the KV of every sequence is as before.

        Returns rows per feed, numpy or torch; `Engine.feed` brings them into host memory."""

    @abstractmethod
    def roll_back(self, sequence: Sequence, length: int) -> None:
        """Drop KV from position `length` on; raises EngineError when the cache cannot."""

    @abstractmethod
    def release(self, sequence: Sequence) -> None:
        """Free the KV of a sequence."""

    @abstractmethod
    def kv_length(self, sequence: Sequence) -> int:
        """How many tokens the cache itself says it holds."""

    def allocate_beginning(self) -> Any:
        """A handle for the KV of the beginning of prompts, None where there is none; one that gives it has `copy`."""
        return None

    def copy(self, source: Sequence, target: Sequence, length: int) -> None:  # noqa: B027
        """Give `target`, which is empty, the KV of the first `length` tokens of `source`, to the bit."""

    def free(self) -> None:  # noqa: B027  nothing to do where all is in Python
        """Free the model's memory. Called once, by `Engine.close`."""

    def media(self, samples: npt.NDArray[np.float32]) -> Media:
        """Features of mono audio [num_samples] at 16 kHz. Raises PromptError, as every engine that takes none does."""
        raise self._no_audio()

    def audio_tokens(self, media: Media) -> tuple[int, ...]:
        """The part of a prompt that stands for `media`, its two marks included. Raises PromptError like `media`."""
        raise self._no_audio()

    def check_media(self, prompt: Seq[int] | TokenIds, media: Recordings) -> None:
        """Raise PromptError unless the prompt's audio tokens are those of `media`, in its order."""
        if media:
            raise self._no_audio()

    def _no_audio(self) -> PromptError:
        return PromptError(
            f"The model {self.name} takes no audio.",
            hint="Use a Qwen2.5-Omni model, such as Qwen/Qwen2.5-Omni-3B; tiny-omni-edge is a toy of that kind.",
        )
