"""Which engine opens a model. Engines are entry points of the group `skydraft.engines`, ours and those of plug-ins.

A plug-in is a package with an Engine, an EngineKind for it, and a line for that kind in its pyproject.toml. Its models
are written NAME:REST, where NAME is that of the entry point; files and folders may be its own too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib.metadata import EntryPoint, distributions
from pathlib import Path

from skydraft.engines.base import Engine
from skydraft.engines.checkpoint import first_line
from skydraft.engines.options import EngineOptions
from skydraft.errors import BrokenModel, MissingDependency, OptionError

# Every engine takes these.
_FOR_ALL = {"context_len", "max_sequences", "shared_cache", "profile_path", "probe_again", "notify"}


@dataclass(frozen=True, slots=True)
class EngineKind:
    """How models of one sort are recognised and opened.

    `what` is a noun phrase for messages. `open` gets the model as the user wrote it, its path (for NAME:REST it is
    REST), and options. It imports the libraries, since the modules of all kinds are imported to find the right one.
    `takes` names the fields of EngineOptions that apply besides those of every engine. `claims` tells whether a file or
    folder is of this sort; without it only NAME:REST is. A `general` one is asked last.
    """

    what: str
    open: Callable[[str, Path, EngineOptions], Engine]
    takes: frozenset[str] = frozenset()
    claims: Callable[[Path], bool] | None = None
    general: bool = False

    def __post_init__(self) -> None:
        if unknown := self.takes - {field.name for field in fields(EngineOptions)}:
            raise ValueError(f"EngineOptions has no {min(unknown)}")


def engine_names() -> frozenset[str]:
    """Names allowed before the colon of a model's name: plug-ins, and our engines that claim no files."""
    entries = _entries().items()
    return frozenset(name for name, entry in entries if not _is_ours(entry) or _load(entry).claims is None)


def open_engine(kind: str, spec: str, path: Path | None, options: EngineOptions) -> Engine:
    """Open a model: with a path by the engine that claims it, without one by the engine whose name is `kind`.

    Raises BrokenModel, MissingDependency or OptionError.
    """
    entries = _entries()
    engine = _load(entries[kind]) if path is None else _claiming(spec, path, list(entries.values()))
    for field in fields(EngineOptions):
        if getattr(options, field.name) != field.default and field.name not in _FOR_ALL | engine.takes:
            name = "edge-adapter" if field.name == "adapter" else field.name
            option = "--" + name.removeprefix("num_").replace("_", "-")
            raise OptionError(f"{option} does not apply to {spec}, which is {engine.what}.", hint=f"Remove {option}.")
    return engine.open(spec, path or Path(spec.partition(":")[2]), options)


def _entries() -> dict[str, EntryPoint]:
    """All engines by name, plug-ins first. A plug-in cannot replace one of our names."""
    # Not by `entry_points`, which reads the first metadata of a package: in a source folder those are old.
    every = (entry for package in distributions() for entry in package.entry_points)
    entries = sorted((entry for entry in every if entry.group == "skydraft.engines"), key=_is_ours)
    if not any(map(_is_ours, entries)):
        raise MissingDependency(
            "The installed package skydraft does not name its engines: it was installed from an older version.",
            hint="Reinstall it; in its source folder: pip install -e .",
        )
    return {entry.name: entry for entry in entries}


def _is_ours(entry: EntryPoint) -> bool:
    return entry.module.startswith("skydraft.engines.")


def _load(entry: EntryPoint) -> EngineKind:
    try:
        kind = entry.load()
    except Exception as error:
        raise MissingDependency(
            f"The engine {entry.name} ({entry.value}) does not load ({type(error).__name__}: {first_line(error)}).",
            hint="Reinstall its package, or uninstall it.",
        ) from error
    if not isinstance(kind, EngineKind):
        raise MissingDependency(f"The engine {entry.name} ({entry.value}) is not an EngineKind.", hint="Update it.")
    return kind


def _claiming(spec: str, path: Path, entries: list[EntryPoint]) -> EngineKind:
    kinds = [kind for entry in entries if (kind := _claimed(entry, path))]
    if not kinds:
        raise BrokenModel(f"No engine opens {spec}.", hint="Give a .gguf file or a transformers checkpoint's folder.")
    return min(kinds, key=lambda kind: kind.general)  # of equals the first


def _claimed(entry: EntryPoint, path: Path) -> EngineKind | None:
    try:
        kind = _load(entry)
        return kind if kind.claims and kind.claims(path) else None
    except Exception:
        if _is_ours(entry):
            raise
        return None  # a broken plug-in raises only when a model names it
