"""Thinkers of Qwen2.5-Omni small enough to be made on the spot, and clips to play to them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from skydraft.engines.base import Engine
from skydraft.types import Recordings

from .tiny_checkpoint import END, config_of, save_tokenizer

AUDIO, AUDIO_START, AUDIO_END = "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"
_MARKS = [END, "<|im_start|>", AUDIO, AUDIO_START, AUDIO_END, "<|IMAGE|>", "<|VIDEO|>"]


def clip(seed: int, duration_s: float) -> npt.NDArray[np.float32]:
    """A gliding tone in noise, [num_samples] at 16 kHz."""
    rng = np.random.default_rng(seed)
    time = np.arange(round(duration_s * 16_000)) / 16_000
    tone = np.sin(2 * np.pi * (120 + 60 * seed + 200 * time) * time)
    return (0.3 * tone + 0.02 * rng.normal(size=len(time))).astype(np.float32)


def spoken(engine: Engine, seed: int, duration_s: float, after: str = "天气") -> tuple[list[int], Recordings]:
    """A prompt that has a clip in its middle."""
    media = engine.media(clip(seed, duration_s))
    prompt = [*engine.vocab.encode("<|im_start|>今天"), *engine.audio_tokens(media), *engine.vocab.encode(after)]
    return prompt, (media,)


def spoken_often(engine: Engine, *clips: tuple[int, float]) -> tuple[list[int], Recordings]:
    """A prompt of a turn for each clip, of (seed, seconds)."""
    turns = [spoken(engine, seed, duration_s) for seed, duration_s in clips]
    return [token_id for prompt, _ in turns for token_id in prompt], tuple(media[0] for _, media in turns)


def heard(token_ids: list[int], media: Recordings) -> dict[str, Any]:
    """What transformers takes for the same."""
    import torch

    given = {"input_ids": torch.tensor([token_ids]), "attention_mask": torch.ones(1, len(token_ids), dtype=torch.long)}
    if not media:
        return given
    features = torch.zeros(len(media), len(media[0].features), max(each.num_frames for each in media))
    mask = torch.zeros(len(media), features.shape[-1], dtype=torch.long)
    for row, each in enumerate(media):
        features[row, :, : each.num_frames] = torch.tensor(each.features)
        mask[row, : each.num_frames] = 1
    return {**given, "input_features": features, "feature_attention_mask": mask}


def save_omni(folder: Path, *, seed: int) -> Path:
    """A random thinker with its tokenizer."""
    import torch
    import transformers

    vocab = save_tokenizer(folder, _MARKS)
    marks = {"audio": AUDIO, "image": "<|IMAGE|>", "video": "<|VIDEO|>"}
    ids = {f"{name}_token_index": vocab[mark] for name, mark in marks.items()}
    ids |= {"audio_start_token_id": vocab[AUDIO_START], "audio_end_token_id": vocab[AUDIO_END]}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    text = config_of(len(vocab)) | {"max_position_embeddings": 2048, "initializer_range": 0.02, "rope_parameters": rope}
    audio = {
        "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "output_dim": 32,
        "num_mel_bins": 128,
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    torch.manual_seed(seed)
    config = transformers.Qwen2_5OmniThinkerConfig(audio_config=audio, vision_config=vision, text_config=text, **ids)
    config.vision_start_token_id = config.vision_end_token_id = vocab["<|IMAGE|>"]  # without them, no get_rope_index
    thinker = transformers.Qwen2_5OmniThinkerForConditionalGeneration(config)
    _widen(thinker)
    thinker.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=128).save_pretrained(folder)
    return folder


def make_full(folder: Path) -> None:
    """Turn a thinker's folder into that of a whole model: nested config, prefixed weights, other parts beside them."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    shard = {f"thinker.{name}": tensor for name, tensor in weights.items()}
    names = ("talker.thinker_to_talker_proj.weight", "token2wav.bigvgan.conv_pre.bias")
    others = {name: torch.zeros(3, 5, 7) for name in names}
    (folder / "model.safetensors").unlink()
    index = {}
    for file, tensors in (("model-1.safetensors", shard), ("model-2.safetensors", others)):
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    thinker = json.loads((folder / "config.json").read_text())
    parts = {f"{part}_config": {"model_type": f"qwen2_5_omni_{part}"} for part in ("talker", "token2wav")}
    config = {"architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni", "thinker_config": thinker, **parts}
    (folder / "config.json").write_text(json.dumps(config))


def _widen(model: Any) -> None:
    """Wide weights, so that the best token is seldom a near tie, and that audio is heard."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.mul_(5.0 if "audio_tower" in name else 20.0)
