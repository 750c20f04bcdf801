"""A GGUF file in another type, made by llama.cpp's own quantizer."""

import ctypes
import os
from pathlib import Path

from skydraft.config import num_cores
from skydraft.engines.llama_library import check_gguf, load_library
from skydraft.engines.llamacpp import load_model
from skydraft.errors import BrokenModel, OptionError

TYPES = {"q4_0": 2, "iq4_nl": 25, "q8_0": 7}  # of llama.h
_TARGET_PARAMS = 1e9


def quantize(source: Path, target: Path, kind: str, *, force: bool = False) -> None:
    """Write all matrices of `source` in one type to `target`. Raises OptionError for a model that is as large as a
    target unless `force`, and BrokenModel for a file that llama.cpp cannot quantize."""
    lib = load_library()
    check_gguf(lib, source)
    model = load_model(lib, source, 0)
    num_params = lib.model_n_params(model)
    lib.model_free(model)
    if num_params > _TARGET_PARAMS and not force:
        says = (
            f"{source.name} has {num_params / 1e9:.1f} billion parameters, as a target: in another type it is another"
        )
        hint = "A draft model may change, as the target checks it. For a target, give --force."
        raise OptionError(f"{says} model, which writes other texts.", hint=hint)
    params = lib.model_quantize_default_params()
    params.nthread, params.ftype, params.allow_requantize, params.pure = num_cores(), TYPES[kind], True, True
    part = target.with_name(f"{target.name}.part")
    target.parent.mkdir(parents=True, exist_ok=True)
    if lib.model_quantize(os.fsencode(source), os.fsencode(part), ctypes.byref(params)):
        part.unlink(missing_ok=True)
        raise BrokenModel(
            f"llama.cpp cannot write {source} as {kind}.", hint="Check the free space, or choose another type."
        )
    part.replace(target)
