"""Folders of checkpoints in the layout of the Hugging Face hub: weights, tokenizer, and what may load them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skydraft.engines.options import EngineOptions
from skydraft.engines.vocab import Vocab
from skydraft.errors import BrokenModel, MissingDependency, OptionError

_DTYPES = ("float32", "bfloat16", "float16")


def load_library() -> tuple[Any, Any]:
    """The modules torch and transformers. Raises MissingDependency when one is not installed."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingDependency(
            f"Checkpoint folders need torch and transformers, and {error.name or 'one of them'} is not installed.",
            hint="Run: pip install 'skydraft[transformers]'.",
        ) from error
    return torch, transformers


def check_device(torch: Any, name: str) -> Any:
    """The torch device of that name. Raises OptionError when there is none."""
    kind, _, index = name.partition(":")
    if name != "cpu" and (kind != "cuda" or not (index.isdecimal() or name == "cuda")):
        raise OptionError(f"--device must be cpu or cuda, not '{name}'.", hint="A second GPU is cuda:1.")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise OptionError(f"torch sees no device {name} here.", hint="Use --device cpu.")
    return torch.device(name)


def load_checkpoint(
    path: Path, model_class: str, device: Any, options: EngineOptions, *, unused: Seq[str] = ()
) -> tuple[Any, Any]:
    """Model, in evaluation mode on its device, and tokenizer of a local folder; the parts named `unused` are dropped.

    Nothing is asked of a network and no code in the folder is run. Raises BrokenModel when a weight that the model
    needs is not in the folder: transformers would draw it at random.
    """
    torch, transformers = load_library()
    if options.dtype not in _DTYPES:
        raise OptionError(f"--dtype must be one of {', '.join(_DTYPES)}, not '{options.dtype}'.")
    quantized = _quantized(torch, transformers, device, options)
    given = {"local_files_only": True, "trust_remote_code": False}
    try:
        with quiet(transformers):
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, **given)
            model, loaded = getattr(transformers, model_class).from_pretrained(
                path, dtype=getattr(torch, options.dtype), output_loading_info=True, **given, **quantized
            )
    except Exception as error:
        raise BrokenModel(
            f"transformers cannot load {path}: {first_line(error)}",
            hint="Give a folder with config.json, weights and tokenizer of a causal language model.",
        ) from error
    _check_tokenizer(tokenizer, path)
    # transformers would draw them at random
    if missing := sorted(map(str, [*loaded["missing_keys"], *loaded["mismatched_keys"]])):
        raise BrokenModel(
            f"{path} lacks weights of its model: {missing[0]} and {len(missing) - 1} more.", hint="Fetch it again."
        )
    for parent, _, part in (name.rpartition(".") for name in unused):
        setattr(model.get_submodule(parent), part, None)
    return (model.eval() if quantized else model.eval().to(device)), _with_template(tokenizer, path)


def _with_template(tokenizer: Any, path: Path) -> Any:
    """The tokenizer, with the chat template that multimodal checkpoints keep in a file of its own."""
    file = path / "chat_template.json"
    if tokenizer.chat_template is None and file.is_file():
        try:
            tokenizer.chat_template = json.loads(file.read_text())["chat_template"]
        except (ValueError, KeyError, TypeError) as error:
            raise BrokenModel(f"{file} holds no chat template.", hint="Fetch it again.") from error
    return tokenizer


def _quantized(torch: Any, transformers: Any, device: Any, options: EngineOptions) -> dict[str, Any]:
    """What `from_pretrained` takes for 8 or 4 bits a weight; nothing for none."""
    if options.quantization == "none":
        return {}
    if device.type != "cuda":
        raise OptionError(
            f"--quantization {options.quantization} needs a GPU, not --device {device}.",
            hint="Add --device cuda, or remove --quantization.",
        )
    needed = ("bitsandbytes", "accelerate")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise MissingDependency(
            f"--quantization needs {' and '.join(needed)}, and {missing[0]} is not installed.",
            hint=f"Run: pip install {' '.join(needed)}.",
        )
    config = transformers.BitsAndBytesConfig(
        load_in_8bit=options.quantization == "8bit",
        load_in_4bit=options.quantization == "4bit",
        bnb_4bit_compute_dtype=getattr(torch, options.dtype),
    )
    return {"quantization_config": config, "device_map": {"": device}}


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Keep transformers from warning and drawing bars while it loads."""
    logging = transformers.utils.logging
    verbosity, shows_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_bars:
            logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """The first line of what a library says, at most 300 characters."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


def read_vocab(tokenizer: Any, generation_config: Any) -> Vocab:
    """The vocabulary of a fast tokenizer. Raises BrokenModel when the bytes of its tokens cannot be told.

    End tokens are those of the generation config and of the tokenizer. A BOS text is set only where the tokenizer
    adds one by itself. Ids that no token has add no text.
    """
    if not tokenizer.is_fast:
        raise BrokenModel(f"{type(tokenizer).__name__} is not a fast tokenizer.", hint="Add its tokenizer.json.")
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    pieces = _read_pieces(tokenizer, backend)
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    unused = {token_id for token_id, piece in enumerate(pieces) if not piece}
    template = tokenizer.chat_template
    adds_bos = backend.encode("a").ids[:1] == [tokenizer.bos_token_id]
    return Vocab(
        pieces,
        lambda text: list(backend.encode(text, add_special_tokens=False).ids),
        special_ids=special | unused,
        end_ids=_end_ids(tokenizer, generation_config),
        chat_template=template.get("default") if isinstance(template, dict) else template,
        bos_text=tokenizer.bos_token if adds_bos else "",
        eos_text=tokenizer.eos_token or "",
    )


def load_vocab(path: Path) -> Vocab:
    """The vocabulary of a local folder, without its weights. Raises BrokenModel."""
    _, transformers = load_library()
    given = {"local_files_only": True, "trust_remote_code": False}
    try:
        with quiet(transformers):
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, **given)
            if (path / "generation_config.json").is_file():
                config = transformers.GenerationConfig.from_pretrained(path, **given)
            else:
                config = transformers.AutoConfig.from_pretrained(path, **given)
    except Exception as error:
        raise BrokenModel(
            f"transformers cannot load the tokenizer of {path}: {first_line(error)}",
            hint="Give a folder with config.json, weights and tokenizer of a causal language model.",
        ) from error
    _check_tokenizer(tokenizer, path)
    return read_vocab(_with_template(tokenizer, path), config)


def _check_tokenizer(tokenizer: Any, path: Path) -> None:
    # transformers would make up an empty vocabulary
    if not any((path / file).is_file() for file in tokenizer.vocab_files_names.values()):
        raise BrokenModel(f"{path} has no tokenizer.", hint="Add its tokenizer.json.")


def _end_ids(tokenizer: Any, generation_config: Any) -> set[int]:
    configured = getattr(generation_config, "eos_token_id", None)
    ends = configured if isinstance(configured, list) else [configured]
    return {int(token_id) for token_id in (*ends, tokenizer.eos_token_id) if token_id is not None}


def _read_pieces(tokenizer: Any, backend: Any) -> list[bytes]:
    decoder = json.dumps(json.loads(backend.to_str())["decoder"], ensure_ascii=False)
    if '"ByteLevel"' in decoder:
        to_bytes = _byte_level
    elif '"ByteFallback"' in decoder or '"Metaspace"' in decoder or "▁" in decoder:
        to_bytes = _sentence_piece
    else:
        raise BrokenModel(
            f"{type(tokenizer).__name__} is neither byte-level nor sentencepiece: its bytes are unknown.",
            hint="Use another model.",
        )
    ids = backend.get_vocab(with_added_tokens=True)
    added = {token_id: token.content.encode() for token_id, token in tokenizer.added_tokens_decoder.items()}
    pieces = [b""] * (max(ids.values()) + 1)
    for text, token_id in ids.items():
        pieces[token_id] = added[token_id] if token_id in added else to_bytes(text)
    return pieces


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE (encoder.py of GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + i): byte for i, byte in enumerate(others)}}


_BYTE_OF = _byte_alphabet()


def _byte_level(text: str) -> bytes:
    try:
        return bytes(_BYTE_OF[char] for char in text)
    except KeyError:  # a token that was put into the vocabulary as plain text
        return text.encode()


def _sentence_piece(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace("▁", " ").encode()
