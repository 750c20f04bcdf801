"""Which engine opens a model: one of ours or a plug-in, which is an entry point of the group `skydraft.engines`.

A plug-in is a package with an Engine, an EngineKind for it, and a line for that kind in its pyproject.toml. Its models
are written NAME:REST, where NAME is that of the entry point; files and folders may be its own too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from skydraft.engines.base import Engine
from skydraft.engines.checkpoint import first_line
from skydraft.engines.options import EngineOptions
from skydraft.errors import BrokenModel, MissingDependency

_GROUP = "skydraft.engines"
# In the order in which they are asked for a file or a folder.
_MODULES = {"toy": "toy", "gguf": "llamacpp", "omni": "transformers_omni", "checkpoint": "transformers_text"}
_OURS = {name: EntryPoint(name, f"{_GROUP}.{module}:KIND", _GROUP) for name, module in _MODULES.items()}


@dataclass(frozen=True, slots=True)
class EngineKind:
    """How models of one sort are recognised and opened.

    `open` gets the model as the user wrote it, its path (REST of a name), and options, of which it uses those that
    apply; it imports the libraries, since the modules of all kinds are imported to find the right one. `claims` tells
    whether a path is of this sort.
    """

    open: Callable[[str, Path, EngineOptions], Engine]
    claims: Callable[[Path], bool] | None = None


def engine_names() -> frozenset[str]:
    return frozenset({"toy", *_plug_ins()})


def open_engine(kind: str, spec: str, path: Path | None, options: EngineOptions) -> Engine:
    """By the engine that claims `path`, or that named `kind`. Raises BrokenModel or MissingDependency."""
    entries = _plug_ins() | _OURS
    engine = _load(entries[kind]) if path is None else _claiming(spec, path, list(entries.values()))
    return engine.open(spec, path or Path(spec.partition(":")[2]), options)


def _plug_ins() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=_GROUP) if entry.name not in _OURS}


def _load(entry: EntryPoint) -> EngineKind:
    try:
        kind: EngineKind = entry.load()
    except Exception as error:
        raise MissingDependency(
            f"The engine {entry.name} ({entry.value}) does not load ({type(error).__name__}: {first_line(error)}).",
            hint="Reinstall its package, or uninstall it.",
        ) from error
    return kind


def _claiming(spec: str, path: Path, entries: list[EntryPoint]) -> EngineKind:
    for entry in entries:
        try:
            kind = _load(entry)
        except MissingDependency:
            continue  # a broken plug-in raises only where a model names it
        if kind.claims and kind.claims(path):
            return kind
    raise BrokenModel(f"No engine opens {spec}.", hint="Give a .gguf file or a transformers checkpoint's folder.")
