"""What llama.cpp would not survive in the header of a GGUF file. Its own reader of headers, which is safe, says it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from skydraft.engines.llama_library import GgufParams, Library
from skydraft.errors import BrokenModel

_U32, _F32, _STRING = 4, 6, 8  # types of values
_MAX_LAYERS = 512  # that of llama.cpp


def check_gguf(lib: Library, path: Path) -> None:
    """Raise BrokenModel for a file that is not GGUF, or that would end the process while it loads or runs."""
    header = lib.gguf_init_from_file(os.fsencode(path), GgufParams(no_alloc=True))
    try:
        fault = _fault(lib, header) if header else "its header cannot be read"
    finally:
        lib.gguf_free(header)
    if fault:
        raise BrokenModel(f"{path} is damaged: {fault}.", hint="Fetch it again, or check it with: skydraft doctor.")


def _fault(lib: Library, header: Any) -> str | None:
    architecture = (_value(lib, header, b"general.architecture", _STRING) or b"").decode(errors="replace")
    layers = _value(lib, header, f"{architecture}.block_count".encode(), _U32)
    if layers is not None and not 1 <= layers <= _MAX_LAYERS:
        return f"its block_count is {layers}"
    for name in ("layer_norm_rms_epsilon", "layer_norm_epsilon"):
        small = _value(lib, header, f"{architecture}.attention.{name}".encode(), _F32)
        if small is not None and not 0 <= small < 1:  # nan neither
            return f"its {name} is no small number"
    return None


def _value(lib: Library, header: Any, name: bytes, kind: int) -> Any:
    """A value of the header; None where it has none of that type, which llama.cpp refuses by itself."""
    at = lib.gguf_find_key(header, name)
    if at < 0 or lib.gguf_get_kv_type(header, at) != kind:
        return None
    read = {_U32: lib.gguf_get_val_u32, _F32: lib.gguf_get_val_f32, _STRING: lib.gguf_get_val_str}
    return read[kind](header, at)
