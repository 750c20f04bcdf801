"""Which engine opens a model: the first of these modules whose `KIND` claims its file or folder. A toy has neither."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from skydraft.engines.base import Engine
from skydraft.engines.options import EngineOptions
from skydraft.engines.toy import VocabularyOnly, open_toy
from skydraft.engines.vocab import Vocab
from skydraft.errors import BrokenModel

_MODULES = ("llamacpp", "transformers_omni", "transformers_text")


@dataclass(frozen=True, slots=True)
class EngineKind:
    """How models of one sort are recognised and opened.

    `open` gets the model as the user wrote it, its path, and options, of which it uses those that apply; it imports the
    libraries, since the modules of all kinds are imported to find the right one. `claims` tells whether a path is of
    this sort.
    """

    open: Callable[[str, Path, EngineOptions], Engine]
    claims: Callable[[Path], bool]


def open_engine(spec: str, path: Path | None, options: EngineOptions) -> Engine:
    """Raises BrokenModel or MissingDependency."""
    if path is None:
        return open_toy(spec, options.context_len, options.max_sequences)
    for module in _MODULES:
        kind: EngineKind = import_module(f"skydraft.engines.{module}").KIND
        if kind.claims(path):
            return kind.open(spec, path, options)
    raise BrokenModel(f"No engine opens {spec}.", hint="Give a .gguf file or a transformers checkpoint's folder.")


def without_weights(vocab: Vocab) -> Engine:
    return VocabularyOnly(vocab)
