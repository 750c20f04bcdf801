"""Using an adapter: the draft model is opened with it, and, where it is applied, from then on by its own name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from skydraft.engines.base import Engine
from skydraft.errors import ModelFilesError, OptionError
from skydraft.learning.adapter import Adapter, read_adapter
from skydraft.learning.merge import file_of, merge, remove
from skydraft.models.adapted import Applied, applied, set_applied

Load: TypeAlias = Callable[[str], Engine]


def merged_with(adapter: Adapter, bare: Engine, cache: Path) -> Path:
    """Where the model of an engine lies with an adapter merged in; the engine is closed. Raises OptionError."""
    with bare:
        return merge(file_of(bare), bare.fingerprint, bare.name, adapter, cache)


def open_learned(name: str, learned: Path | Applied, load: Load, cache: Path) -> Engine:
    """The draft model `name` with an adapter's file, or with what was applied to it, named after both."""
    if isinstance(learned, Applied):
        return reopened(name, learned, load)
    merged = merged_with(read_adapter(learned), load(name), cache)
    return _named(load(str(merged)), name, learned)


def reopened(name: str, entry: Applied, load: Load) -> Engine:
    """The draft model with what was applied to it. Raises ModelFilesError where that is gone."""
    if not Path(entry.merged).exists():
        raise ModelFilesError(
            f"{name} was merged with {entry.adapter}, and {entry.merged} is gone.",
            hint=f"Run: skydraft learn apply {entry.adapter} --edge-model {name}, or: skydraft learn revert.",
        )
    return _named(load(entry.merged), name, Path(entry.adapter))


def _named(engine: Engine, name: str, adapter: Path) -> Engine:
    engine.name = f"{name}+{adapter.stem}"
    return engine


def apply(adapter: Path, model: str, bare: Engine, cache: Path) -> Path:
    """Have the model be used with an adapter from now on; returns where it lies. Raises a SkydraftError."""
    found = read_adapter(adapter)
    merged = merged_with(found, bare, cache)
    _noted(cache, model, Applied(str(adapter.absolute()), str(merged), found.card.trained_on))
    return merged


def revert(model: str, cache: Path) -> Applied:
    """Have the model be used as it was, and delete what was merged. Raises OptionError where nothing is applied."""
    entry = applied(cache).get(model)
    if entry is None:
        raise OptionError(f"No adapter is applied to {model}.", hint="Name the model with --edge-model.")
    _noted(cache, model, None)
    remove(Path(entry.merged))
    return entry


def _noted(cache: Path, model: str, entry: Applied | None) -> None:
    try:
        set_applied(cache, model, entry)
    except OSError as error:
        raise OptionError(
            f"{cache} cannot be written: {error.strerror}.", hint="Set SKYDRAFT_HOME to a folder that you can write to."
        ) from error
