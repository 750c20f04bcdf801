"""Sizes of the two models, as configurations of the Qwen2.5-Omni thinker."""

from dataclasses import dataclass
from typing import Any

from recipes.tiny_omni import tokenizer as tokens


@dataclass(frozen=True, slots=True)
class Size:
    """Widths and depths. Both towers have heads of 32 dimensions."""

    audio_width: int
    audio_layers: int
    text_width: int
    text_layers: int


EDGE = Size(audio_width=64, audio_layers=2, text_width=96, text_layers=2)
CLOUD = Size(audio_width=160, audio_layers=3, text_width=160, text_layers=3)

_HEAD_DIM = 32
_MAX_LEN = 4096


def build_model(size: Size, tokenizer: Any) -> Any:
    """A thinker with random weights from torch's seed, in float32."""
    from transformers import Qwen2_5OmniThinkerForConditionalGeneration

    model = Qwen2_5OmniThinkerForConditionalGeneration(_config(size, tokenizer))
    special_ids = [tokenizer.convert_tokens_to_ids(token) for token in (tokens.END, tokens.PAD)]
    model.generation_config.eos_token_id = special_ids
    model.generation_config.pad_token_id = special_ids[1]
    model.generation_config.do_sample = False
    return model


def _config(size: Size, tokenizer: Any) -> Any:
    from transformers import Qwen2_5OmniThinkerConfig

    def token_id(token: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(token))

    config = Qwen2_5OmniThinkerConfig(
        audio_config=_audio_config(size),
        vision_config=_vision_config(size),
        text_config=_text_config(size, len(tokenizer), token_id),
        audio_token_index=token_id(tokens.AUDIO),
        image_token_index=token_id(tokens.IMAGE),
        video_token_index=token_id(tokens.VIDEO),
        audio_start_token_id=token_id(tokens.AUDIO_START),
        audio_end_token_id=token_id(tokens.AUDIO_END),
        user_token_id=token_id("user"),
    )
    # Not fields of the class, yet its code for positions asks for them.
    config.vision_start_token_id = token_id(tokens.VISION_START)
    config.vision_end_token_id = token_id(tokens.VISION_END)
    config.pad_token_id = token_id(tokens.PAD)
    config.bos_token_id = None
    config.eos_token_id = token_id(tokens.END)
    return config


def _audio_config(size: Size) -> dict[str, Any]:
    return {
        "num_mel_bins": 128,
        "d_model": size.audio_width,
        "encoder_layers": size.audio_layers,
        "encoder_attention_heads": size.audio_width // _HEAD_DIM,
        "encoder_ffn_dim": 4 * size.audio_width,
        "max_source_positions": 1500,
        "n_window": 200,  # attention within 4 s, so a whole clip: pauses and rate need more than a moment
        "output_dim": size.text_width,
    }


def _vision_config(size: Size) -> dict[str, Any]:
    """The smallest tower there can be: nothing here sees, but the architecture has it."""
    return {
        "depth": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 2,
        "spatial_merge_size": 1,
        "temporal_patch_size": 1,
        "window_size": 4,
        "out_hidden_size": size.text_width,
        "fullatt_block_indexes": [0],
    }


def _text_config(size: Size, vocab_size: int, token_id: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": size.text_width,
        "intermediate_size": 3 * size.text_width,
        "num_hidden_layers": size.text_layers,
        "num_attention_heads": size.text_width // _HEAD_DIM,
        "num_key_value_heads": size.text_width // _HEAD_DIM,
        "max_position_embeddings": _MAX_LEN,
        "max_window_layers": size.text_layers,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "tie_word_embeddings": False,
        "pad_token_id": token_id(tokens.PAD),
        "eos_token_id": token_id(tokens.END),
    }
