"""What the header of a GGUF file says of a model; the weights after it are never read."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

GGUF_MAGIC = b"GGUF"
_U32, _STRING, _ARRAY, _U64 = 4, 8, 9, 10
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", _U32: "I", 5: "i", 6: "f", 7: "?", _U64: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q").unpack
MISSING = "its file is missing"
_MOST = 1 << 22  # fields, items of an array, bytes of a text


def unfitness(path: Path) -> str:
    """Why a file can be neither draft nor target model, or "". Never raises."""
    try:
        if not path.is_file():  # a pipe would be waited for
            return MISSING
        with path.open("rb") as file:
            return _unfitness_of(_fields(file.read))
    except OSError as error:
        return f"its file cannot be read ({error.strerror})"
    except (ValueError, LookupError, TypeError, struct.error):
        return "its file is damaged, or of an old form of GGUF"


def _unfitness_of(fields: dict[str, Any]) -> str:
    name = fields.get("general.architecture")
    kind = "mmproj" if name == "clip" else fields.get("general.type")
    if kind in ("adapter", "mmproj"):
        return "it is an adapter" if kind == "adapter" else "it is the projector of another model"
    if fields.get("split.count", 0) not in (0, 1):
        return "it is in several parts; join them with llama-gguf-split --merge"
    if not isinstance(fields.get("tokenizer.ggml.tokens"), list):
        return "it is no language model"
    if name == "gptoss" or any(key.endswith(".vision.block_count") for key in fields):
        return "only Ollama reads this form; get the model from hf.co instead"
    if fields.get(f"{name}.pooling_type") or fields.get(f"{name}.attention.causal") is False:
        return "it is an embedding model"
    return ""


def _fields(read: Callable[[int], bytes]) -> dict[str, Any]:
    if read(4) != GGUF_MAGIC or _value(read, _U32) not in (2, 3):
        raise ValueError
    _value(read, _U64)  # of matrices
    return {_value(read, _STRING): _value(read, _value(read, _U32)) for _ in range(_size(read))}


def _value(read: Callable[[int], bytes], kind: int) -> Any:
    """Raises struct.error where the file ends, LookupError for a kind that there is not."""
    if kind == _STRING:
        size = _size(read)
        return bytes(struct.unpack(f"{size}s", read(size))[0]).decode(errors="replace")
    if kind != _ARRAY:
        return struct.unpack(f"<{_FORMATS[kind]}", read(struct.calcsize(_FORMATS[kind])))[0]
    kind, num = _value(read, _U32), _size(read)
    if kind == _STRING:
        return [read(min(_LENGTH(read(8))[0], _MOST)) for _ in range(num)]  # there are 300,000
    return struct.unpack(f"<{num}{_FORMATS[kind]}", read(num * struct.calcsize(_FORMATS[kind])))


def _size(read: Callable[[int], bytes]) -> int:
    return min(int(_value(read, _U64)), _MOST)
