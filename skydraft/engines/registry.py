"""Which engine opens a model: the first of these classes that takes its file or folder. A toy has neither."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from skydraft.engines.base import Engine
from skydraft.engines.checkpoint import is_omni
from skydraft.engines.options import EngineOptions
from skydraft.engines.toy import open_toy

# Module, class, and whether a path is of this sort. A module imports its libraries when it is needed.
KINDS: list[tuple[str, str, Callable[[Path], bool]]] = [
    ("skydraft.engines.llamacpp", "LlamaCppEngine", Path.is_file),
    ("skydraft.engines.transformers_omni", "OmniEngine", is_omni),
    ("skydraft.engines.transformers_text", "TransformersEngine", Path.is_dir),
]


def open_engine(spec: str, path: Path | None, options: EngineOptions) -> Engine:
    """`path` is a file or a folder. Raises BrokenModel or MissingDependency."""
    if path is None:
        return open_toy(spec, options.context_len, options.max_sequences)
    module, name = next((module, name) for module, name, claims in KINDS if claims(path))
    engine: Engine = getattr(import_module(module), name)(path, options, name=spec)
    return engine
