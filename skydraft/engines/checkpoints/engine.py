"""The files of models: fingerprints of weights, and loading of checkpoint folders in Hugging Face's format."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from skydraft.characters import from_json
from skydraft.config import free_bytes
from skydraft.engines.options import EngineOptions
from skydraft.engines.vocab import Vocab
from skydraft.errors import BrokenModel, MissingDependency, OptionError, SkydraftError, importing

_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4.5}
_WANTED = "Give a folder with config.json, weights and tokenizer of a causal language model."
_FITTING = SpecifierSet(">=5.20,<5.25", prereleases=True)  # transformers versions, as in pyproject.toml, all tested
_LOCAL = {"local_files_only": True, "trust_remote_code": False}
_NUM_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16


def weights_fingerprint(files: Iterable[Path]) -> str:
    """Return 32 hex digits from the files' sizes and 16 pieces of each. File names do not count."""
    total = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.name):
        size = path.stat().st_size
        total.update(f"{size}\n".encode())
        with path.open("rb") as file:
            for number in range(_NUM_SAMPLES):
                file.seek(max(size - _SAMPLE_BYTES, 0) * number // (_NUM_SAMPLES - 1))
                total.update(file.read(_SAMPLE_BYTES))
    return total.hexdigest()[:32]


def is_omni(path: Path) -> bool:
    """Whether a folder's config.json describes a thinker with all parts; transformers would fill in the 7B's parts."""
    with suppress(OSError, ValueError, AttributeError, TypeError):
        config = from_json((path / "config.json").read_bytes())
        is_whole = {"audio_config", "text_config", "vision_config"} <= set(config.get("thinker_config", config))
        return is_whole and config.get("model_type") in ("qwen2_5_omni", "qwen2_5_omni_thinker")
    return False


def load_library() -> tuple[Any, Any]:
    with importing("Checkpoint folders need", "transformers"):
        import torch
        import transformers
    return torch, transformers


@contextmanager
def failing(transformers: Any, does: str, kind: type[SkydraftError], hint: str = "") -> Iterator[None]:
    """Raise `kind` for any error of transformers in the block; MissingDependency if its version is not supported."""
    try:
        yield
    except Exception as error:
        says, version = first_line(error), transformers.__version__
        if version in _FITTING:
            raise kind(f"transformers {does}: {says}", hint=hint) from error
        says = f"transformers {version} {does} ({says}); skydraft knows {_FITTING}."
        raise MissingDependency(says, hint=f"Run: pip install 'transformers{_FITTING}'.") from error


def check_device(torch: Any, name: str) -> Any:
    """Return the torch device of that name. Raises OptionError."""
    num_gpus = torch.cuda.device_count()
    names = ["cpu", *(["cuda"] if num_gpus else []), *(f"cuda:{number}" for number in range(num_gpus))]
    if name not in names:
        raise OptionError(f"--device must be {' or '.join(names)} here, not '{name}'.")
    return torch.device(name)


def load_checkpoint(path: Path, model_class: str, options: EngineOptions, *, unused: Seq[str] = ()) -> tuple[Any, Any]:
    """Load (model, tokenizer) from a local folder, in evaluation mode on its device, without the parts named `unused`.

    This uses no network and runs no code of the folder. Raises OptionError, and BrokenModel if a weight is missing.
    """
    torch, transformers = load_library()
    device = check_device(torch, options.device)
    if options.dtype not in _BITS:
        raise OptionError(f"--dtype must be one of {', '.join(_BITS)}, not '{options.dtype}'.")
    if device.type == "cpu":
        _tell_of_memory(path, options)
    how = _weights(torch, transformers, device, options.dtype)
    with failing(transformers, f"cannot load {path}", BrokenModel, _WANTED), quiet(transformers):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **_LOCAL)
        load = getattr(transformers, model_class).from_pretrained
        model, loaded = load(path, output_loading_info=True, **how, **_LOCAL)
    # transformers would initialize them at random
    if missing := sorted(map(str, [*loaded["missing_keys"], *loaded["mismatched_keys"]])):
        hint = "Fetch it again."
        raise BrokenModel(f"{path} lacks weights of its model: {missing[0]} and {len(missing) - 1} more.", hint=hint)
    for parent, _, part in (name.rpartition(".") for name in unused):
        setattr(model.get_submodule(parent), part, None)
    return (model if "device_map" in how else model.to(device)).eval(), _checked(tokenizer, path)


def _weights(torch: Any, transformers: Any, device: Any, dtype: str) -> dict[str, Any]:
    """Return loading arguments for a type of weights. For int8 on a CPU torchao is faster; its 4 bits need a GPU."""
    if not dtype.startswith("int"):
        return {"dtype": getattr(torch, dtype)}
    with importing(f"--dtype {dtype} needs", "quantized"):
        import accelerate  # noqa: F401
        import bitsandbytes  # noqa: F401
        from torchao.quantization import Int8WeightOnlyConfig
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # it logs a line for each matrix
    how_4bit = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    config = transformers.BitsAndBytesConfig(dtype == "int8", dtype == "int4", **how_4bit)
    if dtype == "int8" and device.type == "cpu":
        config = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    return {"dtype": torch.bfloat16, "device_map": device, "quantization_config": config}


def _tell_of_memory(path: Path, options: EngineOptions) -> None:
    """Show a line if the weights may not fit into memory. Files have at least 16 bits a weight."""
    size = sum(file.stat().st_size for file in path.glob("*.safetensors")) * _BITS[options.dtype] / 16
    if (free := free_bytes()) is not None and size > free:
        takes = f"about {size / 1e9:.1f} GB of memory in {options.dtype}, and {free / 1e9:.1f} GB are free"
        options.notify(f"{path} takes {takes}; --dtype bfloat16 or int8 takes less.")


def _checked(tokenizer: Any, path: Path) -> Any:
    # transformers would create an empty vocabulary
    if not any((path / file).is_file() for file in tokenizer.vocab_files_names.values()):
        raise BrokenModel(f"{path} has no tokenizer.", hint="Add its tokenizer.json.")
    file = path / "chat_template.json"
    if tokenizer.chat_template is None and file.is_file():
        try:
            tokenizer.chat_template = from_json(file.read_bytes())["chat_template"]
        except (ValueError, KeyError, TypeError) as error:
            raise BrokenModel(f"{file} holds no chat template.", hint="Fetch it again.") from error
    return tokenizer


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    logs = transformers.utils.logging
    verbosity = logs.get_verbosity()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(verbosity)
        logs.enable_progress_bar()


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip()[:300]


def read_vocab(tokenizer: Any, generation_config: Any) -> Vocab:
    """Read the vocabulary; both config and tokenizer name end tokens. Raises BrokenModel for unknown bytes."""
    if not tokenizer.is_fast:
        raise BrokenModel(f"{type(tokenizer).__name__} is not a fast tokenizer.", hint="Add its tokenizer.json.")
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    pieces = _read_pieces(tokenizer, backend)
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    unused = {token_id for token_id, piece in enumerate(pieces) if not piece}
    template = tokenizer.chat_template
    templates = template if isinstance(template, dict) else {"default": template}
    ends = getattr(generation_config, "eos_token_id", None)
    ends = [*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id]
    adds_bos = backend.encode("a").ids[:1] == [tokenizer.bos_token_id]
    return Vocab(
        pieces, lambda text: list(backend.encode(text, add_special_tokens=False).ids),
        special_ids=special | unused, end_ids=(int(token_id) for token_id in ends if token_id is not None),
        chat_template=templates.get("default"), tool_template=templates.get("tool_use"),
        bos_text=tokenizer.bos_token if adds_bos else "", eos_text=tokenizer.eos_token or "",
    )  # fmt: skip


def _read_pieces(tokenizer: Any, backend: Any) -> list[bytes]:
    decoder = json.dumps(json.loads(backend.to_str())["decoder"], ensure_ascii=False)
    to_bytes: Callable[[str], bytes]
    if '"ByteLevel"' in decoder:
        to_bytes = _byte_level()
    elif '"ByteFallback"' in decoder or '"Metaspace"' in decoder or "▁" in decoder:
        to_bytes = _sentence_piece
    else:
        says = f"{type(tokenizer).__name__} is neither byte-level nor sentencepiece: its bytes are unknown."
        raise BrokenModel(says, hint="Use another model.")
    ids = backend.get_vocab(with_added_tokens=True)
    added = {token_id: token.content.encode() for token_id, token in tokenizer.added_tokens_decoder.items()}
    pieces = [b""] * (max(ids.values()) + 1)
    for text, token_id in ids.items():
        pieces[token_id] = added[token_id] if token_id in added else to_bytes(text)
    return pieces


def _byte_level() -> Callable[[str], bytes]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    # Tokens with other characters are plain text in the vocabulary.
    return lambda text: bytes(map(byte_of.__getitem__, text)) if byte_of.keys() >= set(text) else text.encode()


def _sentence_piece(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace("▁", " ").encode()
