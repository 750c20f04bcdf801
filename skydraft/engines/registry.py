"""From a model's files to its engine. Heavy libraries are imported only when their engine is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from skydraft.engines.base import Engine, EngineOptions
from skydraft.engines.toy import open_toy


def open_engine(kind: Literal["toy", "gguf", "folder"], spec: str, path: Path | None, options: EngineOptions) -> Engine:
    """Open a model of a kind. Raises BrokenModel, MissingDependency or OptionError."""
    if kind == "toy":
        return open_toy(spec, options.context_len)
    assert path is not None  # models.resolve gives a path for every other kind
    if kind == "gguf":
        from skydraft.engines.llamacpp import LlamaCppEngine

        return LlamaCppEngine(path, options, name=spec)
    from skydraft.engines.transformers_text import TransformersEngine

    return TransformersEngine(path, options, name=spec)
