"""The tokenizer that both models share: byte-level BPE of the Qwen2 kind, nearly one token per Chinese character."""

from pathlib import Path
from typing import Any

from recipes.tiny_omni.captions import PROMPTS
from recipes.tiny_omni.wording import FRAMES, WORDINGS

END = "<|im_end|>"
PAD = "<|endoftext|>"
AUDIO, AUDIO_START, AUDIO_END = "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"
VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", "<|VIDEO|>"
SPECIAL = (PAD, "<|im_start|>", END, AUDIO, AUDIO_START, AUDIO_END, VISION_START, VISION_END, IMAGE, VIDEO)

# Words of ChatML and of the usual prompt that are one token each. The words of captions stay characters: a caption
# then has about fifty tokens, and the class of an attribute is decided at exactly one of them.
_WHOLE = ("system", "user", "assistant", "请用一句话描述", "说话人的", "特点")

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- else %}
{%- for part in message['content'] %}
{%- if part['type'] == 'audio' or 'audio' in part %}
{{- '<|audio_bos|><|AUDIO|><|audio_eos|>' }}
{%- elif part['type'] == 'image' or 'image' in part %}
{{- '<|vision_bos|><|IMAGE|><|vision_eos|>' }}
{%- elif part['type'] == 'video' or 'video' in part %}
{{- '<|vision_bos|><|VIDEO|><|vision_eos|>' }}
{%- else %}
{{- part['text'] }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def build_tokenizer() -> Any:
    """A `Qwen2Tokenizer` with its merges learned from the characters of captions and prompts. The same every time."""
    from transformers import Qwen2Tokenizer

    vocab, merges = _learn_merges()
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=merges, eos_token=END, pad_token=PAD, unk_token=PAD)
    tokenizer.add_special_tokens({"additional_special_tokens": [token for token in SPECIAL if token not in (PAD, END)]})
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.model_max_length = 4096
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` with the chat template inside."""
    tokenizer.save_pretrained(folder, save_jinja_files=False)


def _learn_merges() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges: all bytes, then every character of captions and prompts, then the whole words."""
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # More copies of a character than of any word: it is complete before words grow out of it.
    tokenizer.train_from_iterator([*(_characters() * 100), *(_WHOLE * 2)], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def _characters() -> list[str]:
    texts = [*PROMPTS, *(text for group in (*FRAMES.values(), *WORDINGS.values()) for text in group)]
    return sorted({char for text in texts for char in text} | set("，。、？！：；\n"))
