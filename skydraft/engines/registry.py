"""From a model's files to its engine. Heavy libraries are imported only when their engine is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from skydraft.engines.base import Engine, EngineOptions
from skydraft.engines.toy import open_toy
from skydraft.errors import OptionError


def open_engine(kind: Literal["toy", "gguf", "folder"], spec: str, path: Path | None, options: EngineOptions) -> Engine:
    """Open a model of a kind. Raises BrokenModel, MissingDependency or OptionError."""
    _check_applies(kind, spec, options)
    if kind == "toy":
        return open_toy(spec, options.context_len)
    assert path is not None  # models.resolve gives a path for every other kind
    if kind == "gguf":
        from skydraft.engines.llamacpp import LlamaCppEngine

        return LlamaCppEngine(path, options, name=spec)
    if _model_type(path) in ("qwen2_5_omni", "qwen2_5_omni_thinker"):
        from skydraft.engines.transformers_omni import OmniEngine

        return OmniEngine(path, options, name=spec)
    from skydraft.engines.transformers_text import TransformersEngine

    return TransformersEngine(path, options, name=spec)


def _model_type(path: Path) -> str:
    """What a checkpoint says it is; "" where it does not, which is for its engine to refuse."""
    try:
        return str(json.loads((path / "config.json").read_text())["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


_TAKEN: dict[str, set[str]] = {
    "toy": set(),
    "gguf": {"num_threads", "gpu_layers"},
    "folder": {"num_threads", "device", "dtype", "quantization"},
}


def _check_applies(kind: str, spec: str, options: EngineOptions) -> None:
    """Raise OptionError for an option that this kind of model cannot follow."""
    default = EngineOptions()
    for name in ("num_threads", "gpu_layers", "device", "dtype", "quantization"):
        if name not in _TAKEN[kind] and getattr(options, name) != getattr(default, name):
            option = "--" + name.removeprefix("num_").replace("_", "-")
            what = {"toy": "a toy", "gguf": "a GGUF model", "folder": "a transformers checkpoint"}[kind]
            raise OptionError(f"{option} cannot apply to {spec}, which is {what}.", hint="Leave it away.")
