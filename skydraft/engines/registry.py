"""Chooses the engine for a model by its file or folder; a toy has neither. Engines are imported when needed."""

from pathlib import Path

from skydraft.engines.base import Engine
from skydraft.engines.checkpoints.engine import is_omni
from skydraft.engines.options import EngineOptions
from skydraft.engines.toy import open_toy


def open_engine(spec: str, path: Path | None, options: EngineOptions) -> Engine:
    """Open the model in a file or folder `path`, or a toy without one. Raises BrokenModel or MissingDependency."""
    if path is None:
        return open_toy(spec, options.context_len, options.max_sequences)
    if path.is_file():
        from skydraft.engines.llama.engine import LlamaCppEngine

        return LlamaCppEngine(path, options, name=spec)
    if is_omni(path):
        from skydraft.engines.checkpoints.omni import OmniEngine

        return OmniEngine(path, options, name=spec)
    from skydraft.engines.checkpoints.text import TransformersEngine

    return TransformersEngine(path, options, name=spec)
