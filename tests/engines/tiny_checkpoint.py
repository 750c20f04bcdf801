"""Models small enough to be made on the spot, with random weights: checkpoints with a tokenizer trained on a few lines,
thinkers of Qwen2.5-Omni with clips to play to them, and the same for llama.cpp."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from skydraft.engines.base import Engine
from skydraft.engines.options import EngineOptions
from skydraft.types import Recordings

TEXT = [
    "今天天气很好，我们去公园走走。公园里有很多人在散步，孩子们在草地上跑来跑去。",
    "请用一句话描述这段语音的情绪：语速很快，音调很高，听起来非常高兴。",
    "The small model drafts a block of tokens, and the large model checks them in one forward pass.",
    "Speculative decoding keeps the longest right prefix; the next token comes from the large model.",
]
END = "<|endoftext|>"
NUM_PADDING_ROWS = 7  # of the head, past the tokenizer
# One thread: on cores that others use, threads that wait for each other take 100 times as long.
OPTIONS = EngineOptions(context_len=640, num_threads=1)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}"
AUDIO, AUDIO_START, AUDIO_END = "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"
_MARKS = [END, "<|im_start|>", AUDIO, AUDIO_START, AUDIO_END, "<|IMAGE|>", "<|VIDEO|>"]
GGUF_PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def save_tokenizer(folder: Path, marks: Sequence[str] = (END, "<|im_start|>")) -> dict[str, int]:
    """Train a byte-level BPE on TEXT and save it; returns its ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how = {"vocab_size": 400, "initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(special_tokens=list(marks), **how)
    tokenizer.train_from_iterator(TEXT, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, chat_template=TEMPLATE)
    wrapped.save_pretrained(folder)
    return dict(wrapped.get_vocab())


def copy_of(source: Path, folder: Path, left_out: str = "") -> Path:
    for file in source.iterdir():
        if file.name != left_out:
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def config_of(vocab_size: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size + NUM_PADDING_ROWS, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
        "initializer_range": 0.4,  # wide, so that the best token is seldom a near tie
        "eos_token_id": 0, "bos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
    }  # fmt: skip


def save_model(folder: Path, config_name: str, *, seed: int, like: Path | None = None, **config: Any) -> Path:
    """A random model of that config class, and its tokenizer. With `like`, a little away from that model's weights."""
    import torch
    import transformers

    vocab_size = len(save_tokenizer(folder))
    torch.manual_seed(seed)
    whole = getattr(transformers, config_name)(**(config_of(vocab_size) | config))
    model = transformers.AutoModelForCausalLM.from_config(whole)
    if like is not None:
        base = transformers.AutoModelForCausalLM.from_pretrained(like)
        with torch.no_grad():
            for own, other in zip(model.parameters(), base.parameters(), strict=True):
                own.mul_(0.01).add_(other)
    model.save_pretrained(folder)
    return folder


def to_gguf(folder: Path, path: Path, *templates: dict[str, str]) -> Path:
    """The checkpoint as a file for llama.cpp, in float32, with a vocabulary of the same size. Needs gguf."""
    import gguf
    from safetensors.numpy import load_file

    weights = load_file(folder / "model.safetensors")
    vocab_size = len(weights["model.embed_tokens.weight"])
    writer = gguf.GGUFWriter(path, "qwen2")
    for add, value in (
        ("context_length", 1024), ("embedding_length", 32), ("block_count", 2), ("feed_forward_length", 64),
        ("head_count", 4), ("head_count_kv", 2), ("layer_norm_rms_eps", 1e-6), ("rope_freq_base", 10000.0),
    ):  # fmt: skip
        getattr(writer, f"add_{add}")(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{number}" for number in range(vocab_size)])
    writer.add_token_types([1] * vocab_size)
    writer.add_token_merges(["t 1"])
    writer.add_chat_template(templates)
    names = {f"model.layers.{n}.{long}": f"blk.{n}.{short}" for n in range(2) for long, short in GGUF_PARTS.items()}
    names |= {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for key, value in weights.items():
        name, _, end = key.rpartition(".")
        writer.add_tensor(f"{names[name]}.{end}", np.ascontiguousarray(value, np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path


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
