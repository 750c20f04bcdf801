"""From clips to what the thinker is fed. The format of training is the format of use."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from recipes.tiny_omni.attributes import Attributes
from recipes.tiny_omni.captions import find_statements, wording_shares
from recipes.tiny_omni.clips import SAMPLE_RATE, Clip, Samples
from recipes.tiny_omni.tokenizer import AUDIO, AUDIO_END, AUDIO_START
from recipes.tiny_omni.wording import WORDINGS

IGNORED = -100  # the label that no loss is taken at
NO_DECISION = -1
DECISIONS = tuple(WORDINGS)  # (attribute, class)

Mel = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Example:
    """A clip as log-mel features [128, num_frames] and its truth."""

    mel: Mel
    attributes: Attributes


def build_extractor() -> Any:
    """The feature extractor of Qwen2.5-Omni. It keeps the absolute level: it only lifts what is 80 dB below the top."""
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=128, return_attention_mask=True)


def mel_of(extractor: Any, samples: Samples) -> Mel:
    """Log-mel features [128, num_frames] of a clip, without padding; a frame is 10 ms."""
    features = extractor(samples, sampling_rate=SAMPLE_RATE, padding="do_not_pad", return_tensors="np")
    return np.asarray(features["input_features"][0], np.float16)


def examples_of(clips: Iterable[Clip]) -> list[Example]:
    """Clips as examples, in order."""
    extractor = build_extractor()
    return [Example(mel_of(extractor, clip.samples), clip.attributes) for clip in clips]


def num_audio_tokens(num_frames: int) -> int:
    """How many `<|AUDIO|>` stand for a clip: one for 40 ms."""
    return ((num_frames - 1) // 2 + 1 - 2) // 2 + 1


def prompt_ids(tokenizer: Any, prompt: str, num_frames: int) -> list[int]:
    """Token ids that ask for a caption, up to and with `assistant` and its newline."""
    content = AUDIO_START + AUDIO + AUDIO_END + prompt
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer.encode(text.replace(AUDIO, AUDIO * num_audio_tokens(num_frames))))


def caption_ids(tokenizer: Any, caption: str) -> tuple[list[int], list[int]]:
    """Token ids of a caption with its end token; and which of `DECISIONS` each token makes, or `NO_DECISION`."""
    encoded = tokenizer(caption, return_offsets_mapping=True)
    made = {found.start: DECISIONS.index((name, found.value)) for name, found in find_statements(caption).items()}
    decided = [made.get(start, NO_DECISION) for start, _ in encoded["offset_mapping"]]
    return [*encoded["input_ids"], tokenizer.eos_token_id], [*decided, NO_DECISION]


def decision_shares(tokenizer: Any) -> Any:
    """[len(DECISIONS), vocab]: how often each token makes a decision. A wording's first token makes it."""
    import torch

    shares = torch.zeros(len(DECISIONS), len(tokenizer))
    for row, (name, value) in enumerate(DECISIONS):
        for wording, share in wording_shares(name, value).items():
            shares[row, tokenizer.encode(wording)[0]] += share
    return shares


def audio_inputs(mels: Sequence[Mel]) -> dict[str, Any]:
    """`input_features` [batch, 128, longest] and the mask of real frames [batch, longest]."""
    import torch

    longest = max(mel.shape[1] for mel in mels)
    features = np.zeros((len(mels), 128, longest), np.float32)
    mask = np.zeros((len(mels), longest), np.int64)
    for row, mel in enumerate(mels):
        features[row, :, : mel.shape[1]] = mel
        mask[row, : mel.shape[1]] = 1
    return {"input_features": torch.from_numpy(features), "feature_attention_mask": torch.from_numpy(mask)}


def training_inputs(tokenizer: Any, batch: Sequence[tuple[Example, str, str]]) -> tuple[dict[str, Any], Any, Any]:
    """Model inputs, labels and decisions for (example, prompt, caption), both [batch, longest].

    Labels are `IGNORED` outside the captions. Decisions are as in `caption_ids`, `NO_DECISION` outside the captions.
    """
    import torch

    rows = []
    for example, prompt, caption in batch:
        rows.append((prompt_ids(tokenizer, prompt, example.mel.shape[1]), *caption_ids(tokenizer, caption)))
    longest = max(len(asked) + len(answer) for asked, answer, _ in rows)
    ids = np.full((len(rows), longest), tokenizer.pad_token_id, np.int64)
    mask, labels, decisions = np.zeros_like(ids), np.full_like(ids, IGNORED), np.full_like(ids, NO_DECISION)
    for row, (asked, answer, decided) in enumerate(rows):
        start, end = len(asked), len(asked) + len(answer)
        ids[row, :end], mask[row, :end] = asked + answer, 1
        labels[row, start:end], decisions[row, start:end] = answer, decided
    inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
    inputs |= audio_inputs([example.mel for example, _, _ in batch])
    return inputs, torch.from_numpy(labels), torch.from_numpy(decisions)
