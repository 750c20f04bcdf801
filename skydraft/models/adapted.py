"""Models with an adapter merged in: their files, their adapters, and the models that they replace.

`adapted/NAME` is a .gguf file or a folder, always complete. `adapted/.NAME.json` has its adapter and its size, and
`adapters.json` lists the models that it replaces. A process holds `adapters.lock` while it changes any of these.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import TypeAdapter

from skydraft.errors import ModelFilesError, OptionError
from skydraft.files import read_file, set_aside, sync, write_whole
from skydraft.models.cache import disk_errors_named, locked

_LOCK_S = 600.0  # merging a large model takes a minute
_FILE, _LOCK, _SCRATCH = "adapters.json", "adapters.lock", ".unfinished-"


@dataclass(frozen=True, slots=True)
class Applied:
    """The replacement of a model: an adapter's file, and the merged model, a .gguf file or a folder.

    `trained_on` are digests of the adapter's training prompts, since its file may be deleted or changed.
    """

    adapter: str
    merged: str
    trained_on: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Merged:
    """One merged model. `adapter` is a file, or "" if that was not noted; it replaces the models `applied_to`."""

    path: Path
    adapter: str
    applied_to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Note:
    """What lies beside a merged model: its adapter's file, and its size."""

    adapter: str
    num_bytes: int | None


_APPLIED, _NOTE = TypeAdapter(dict[str, Applied]), TypeAdapter(_Note)


def merged_dir(cache: Path) -> Path:
    """The folder of merged models."""
    return cache / "adapted"


@contextmanager
def changing(cache: Path) -> Iterator[Path]:
    """Wait for the lock, and yield a new folder beside the merged models, which is deleted at the end with its content.

    Raises ModelFilesError or NotEnoughDisk if the body cannot write.
    """
    folder = merged_dir(cache)
    with disk_errors_named(cache):
        folder.mkdir(parents=True, exist_ok=True)
        busy = f"Another process has been changing {folder} for {_LOCK_S / 60:g} minutes."
        with locked(cache / _LOCK, busy, _LOCK_S):
            for path in folder.glob(f"{_SCRATCH}*"):  # left by a killed process
                shutil.rmtree(path)
            with TemporaryDirectory(prefix=_SCRATCH, dir=folder) as scratch:
                yield Path(scratch)


def publish(made: Path, adapter: str, cache: Path) -> Path:
    """Move a merged model to its place, and return the place. The caller holds the lock.

    Deletes the merged model of an earlier version of the adapter's file, unless it is applied.
    """
    earlier = [each.path for each in merged_models(cache) if each.adapter == adapter and not each.applied_to]
    out = merged_dir(cache) / made.name
    files = _files(made)
    for path in files:
        sync(path)
    _delete(out, made.parent)  # one that is not whole
    note = _Note(adapter, sum(path.stat().st_size for path in files))
    write_whole(_source(out), _NOTE.dump_json(note))
    os.replace(made, out)
    for path in earlier:
        if adapter and path != out:
            _delete(path, made.parent)
    return out


def merged_models(cache: Path) -> tuple[Merged, ...]:
    """List all merged models, by name. Raises ModelFilesError."""
    entries, models = applied(cache), []
    for path in sorted(merged_dir(cache).glob("[!.]*")):
        names = tuple(name for name, entry in entries.items() if entry.merged == str(path))
        models.append(Merged(path, _note(path).adapter, names))
    return tuple(models)


def is_whole(merged: Path) -> bool:
    """Whether a merged model is there, and as large as it was when it was made."""
    if not merged.exists():
        return False
    num_bytes = _note(merged).num_bytes
    return num_bytes is None or num_bytes == sum(path.stat().st_size for path in _files(merged))


def remove_merged(name: str, cache: Path) -> Path:
    """Delete a merged model. Raises OptionError if it is applied, ModelFilesError if it does not exist."""
    with changing(cache) as scratch:
        merged = next((each for each in merged_models(cache) if each.path.name == name), None)
        if merged is None:
            raise ModelFilesError(f"{name} was removed by another process.")
        if merged.applied_to:
            raise OptionError(
                f"{name} is in use for {merged.applied_to[0]}.",
                hint=f"Run: skydraft learn revert --edge-model {merged.applied_to[0]}, which removes it too.",
            )
        _delete(merged.path, scratch)
    return merged.path


def applied(cache: Path) -> dict[str, Applied]:
    """Read the applied adapters, by the user's names of models. A damaged file is set aside. Raises ModelFilesError."""
    path = cache / _FILE
    try:
        try:
            return _APPLIED.validate_json(read_file(path))
        except FileNotFoundError:
            return {}
        except ValueError:
            set_aside(path, "no adapter is applied, until `skydraft learn apply`")
            return {}
    except OSError as error:
        raise ModelFilesError(f"{path} cannot be read: {error.strerror}.", hint="Check its permissions.") from error


def set_applied(cache: Path, model: str, entry: Applied | None) -> None:
    """Replace a model, or with None restore it; delete the merged model that no name uses any more.

    Raises ModelFilesError or NotEnoughDisk.
    """
    with changing(cache) as scratch:
        entries = applied(cache)
        old = entries.pop(model, None)
        if entry is not None:
            entries[model] = entry
        write_whole(cache / _FILE, _APPLIED.dump_json(entries, indent=1))
        if old is not None and all(each.merged != old.merged for each in entries.values()):
            _delete(Path(old.merged), scratch)


def _source(merged: Path) -> Path:
    """The file that names the adapter of a merged model."""
    return merged.with_name(f".{merged.name}.json")


def _note(merged: Path) -> _Note:
    try:
        return _NOTE.validate_json(read_file(_source(merged)))
    except (OSError, ValueError):  # an earlier version made it
        return _Note("", None)


def _files(merged: Path) -> list[Path]:
    return [merged] if merged.is_file() else [path for path in merged.rglob("*") if path.is_file()]


def _delete(merged: Path, scratch: Path) -> None:
    """Delete a merged model, if it exists, in one step: no process ever sees a part of it."""
    if merged.parent == scratch.parent and merged.exists():  # only in our folder, even if adapters.json names another
        os.replace(merged, scratch / f"old-{merged.name}")
        _source(merged).unlink(missing_ok=True)
