"""The thinker of Qwen2.5-Omni: speech and text in, text out. Talker, token2wav and vision are not kept."""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from skydraft.engines.base import Sequence
from skydraft.engines.checkpoints.engine import failing, load_library
from skydraft.engines.checkpoints.text import Slot, TransformersEngine, cache_argument
from skydraft.engines.options import EngineOptions
from skydraft.engines.vocab import TokenIds
from skydraft.errors import BrokenModel, PromptError
from skydraft.types import SAMPLE_RATE, Cost, Media, Recordings, Reuse


@dataclass(slots=True)
class Span:
    """One recording in a prompt: the audio tokens from position `base` on.

    Their embeddings `rows` [num_tokens, hidden_size] stay as long as the sequence, so that they can be fed again after
    a rollback. `media` is dropped once it is encoded.
    """

    base: int
    num_tokens: int
    media: Media | None
    rows: Any = None


@dataclass(slots=True)
class AudioSlot(Slot):
    spans: list[Span] = field(default_factory=list)


class OmniEngine(TransformersEngine):
    """A thinker, from its own folder or a whole Qwen2.5-Omni checkpoint.

    The audio encoder runs once per sequence and recording, in the first forward with its tokens. Positions count tokens
    on all three axes of M-RoPE, as `get_rope_index` does for text and audio, so every sequence's delta is 0. The
    model's `rope_deltas`, kept for its last sequence, is not used.
    """

    takes_audio = True
    _model_class: ClassVar[str] = "Qwen2_5OmniThinkerForConditionalGeneration"
    _unused: ClassVar[tuple[str, ...]] = ("model.visual",)

    def __init__(self, path: Path, options: EngineOptions, *, name: str = "") -> None:
        self._extractor = _load_extractor(path)
        super().__init__(path, options, name=name)

    def media(self, samples: npt.NDArray[np.float32]) -> Media:
        """Return the features of the model's own processor, without its padding."""
        self.lock.check_open()
        hop, window = self._extractor.hop_length, self._extractor.n_fft
        # The last frames reach beyond the clip into zeros, as in the processor's padding.
        padded_len = (len(samples) + window + hop - 1) // hop * hop
        try:
            features = self._extractor(
                samples, sampling_rate=SAMPLE_RATE, padding="max_length", max_length=padded_len, truncation=False,
                return_tensors="np",
            )["input_features"][0]  # fmt: skip
            return Media(np.asarray(features[:, : (len(samples) + hop - 1) // hop], np.float32))
        except ValueError as error:
            raise PromptError(f"This audio cannot be used: {error}.", hint="Give another recording.") from error

    def audio_tokens(self, media: Media) -> tuple[int, ...]:
        self.lock.check_open()
        config = self._model.config
        return (config.audio_start_token_id, *[config.audio_token_id] * media.num_tokens, config.audio_end_token_id)

    def check_media(self, prompt: Seq[int] | TokenIds, media: Recordings) -> None:
        """Raise PromptError unless the prompt has one run of audio tokens for each of `media`, and text after it."""
        runs, num_mels = self._runs(prompt), self._model.config.audio_config.num_mel_bins
        is_heard = [length for _, length in runs] == [each.num_tokens for each in media]
        ends = bool(runs) and sum(runs[-1]) == len(prompt)
        if not is_heard or ends or any(len(each.features) != num_mels for each in media):
            hint = "Insert the result of audio_tokens once for each recording, and text after it."
            raise PromptError(f"The prompt's audio tokens do not match its {len(media)} recordings.", hint=hint)

    def _runs(self, prompt: Seq[int] | TokenIds) -> list[tuple[int, int]]:
        at = self._audio_positions(prompt)
        runs = np.split(at, np.flatnonzero(np.diff(at) != 1) + 1)
        return [(int(run[0]), len(run)) for run in runs if len(run)]

    def _audio_positions(self, token_ids: Seq[int] | TokenIds) -> npt.NDArray[np.intp]:
        return np.flatnonzero(np.asarray(token_ids) == self._model.config.audio_token_id)

    def begin(self, prompt: Seq[int] | TokenIds, media: Recordings = (), reuse: Reuse | None = None) -> Sequence:
        sequence = super().begin(prompt, media, reuse)
        kept = sequence.slot.spans[: len(media)]  # a reused sequence has the same recordings, encoded or not
        sequence.slot.spans = kept + [Span(0, each.num_tokens, each) for each in media[len(kept) :]]
        for span, (base, _) in zip(sequence.slot.spans, self._runs(prompt) if media else (), strict=True):
            span.base = base
        return sequence

    def allocate(self, num_tokens: int) -> AudioSlot:
        return AudioSlot(self._new_cache())

    def _run(self, inputs: Any, position_ids: Any, cache: Any, num_wanted: int) -> Any:
        # The thinker's own forward would compute logits for every token of a prompt.
        decoder = self._model.model.language_model
        cached = {cache_argument(decoder.__class__): cache}
        output = decoder(inputs_embeds=inputs, position_ids=position_ids, use_cache=True, **cached)
        return self._model.lm_head(output.last_hidden_state[0][-num_wanted:])

    def _position_ids(self, base: int, num_rows: int) -> Any:
        return super()._position_ids(base, num_rows)[None].expand(3, -1, -1)  # time, height, width: [3, 1, num_rows]

    def _inputs(self, sequence: Sequence, token_ids: Seq[int] | TokenIds) -> Any:
        """Return embeddings of the next tokens, [1, num_rows, hidden_size], with the speech of audio tokens."""
        embeddings = self._model.get_input_embeddings()(super()._inputs(sequence, token_ids))
        at = self._audio_positions(token_ids)
        for span in sequence.slot.spans if len(at) else ():
            offsets = at + sequence.length - span.base
            is_heard = (offsets >= 0) & (offsets < span.num_tokens)  # generated audio tokens are ordinary tokens
            if is_heard.any():
                embeddings[0, at[is_heard]] = self._encoded(sequence, span)[offsets[is_heard]].to(embeddings.dtype)
        return embeddings

    def _encoded(self, sequence: Sequence, span: Span) -> Any:
        if span.media is not None:
            began, torch = time.perf_counter(), self._torch
            # [1, num_mels, num_frames]
            features = torch.tensor(span.media.features, device=self._device)[None]
            mask = torch.ones(1, span.media.num_frames, dtype=torch.long, device=self._device)
            rows = self._model.get_audio_features(features, mask, return_dict=True).last_hidden_state
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            span.rows, span.media = rows, None
            sequence.prefill_cost += Cost(encode_ms=(time.perf_counter() - began) * 1e3)
        return span.rows


def _load_extractor(path: Path) -> Any:
    _, transformers = load_library()
    does, hint = f"cannot load the audio settings in {path}", "Add its preprocessor_config.json."
    with failing(transformers, does, BrokenModel, hint):
        # The whole model's processor would also need torchvision.
        return transformers.WhisperFeatureExtractor.from_pretrained(path, local_files_only=True)
