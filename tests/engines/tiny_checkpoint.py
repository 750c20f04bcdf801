"""Checkpoints small enough to be made on the spot: random weights, a tokenizer trained on a few lines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skydraft.engines.options import EngineOptions

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
