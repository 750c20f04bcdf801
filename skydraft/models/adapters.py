"""The adapters of each model: `adapters/MODEL/NAME/adapter.gguf`, and beside it the ones before."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote

from skydraft.errors import OptionError
from skydraft.files import write_whole
from skydraft.models.cache import disk_errors_named, locked

FILE = "adapter.gguf"
MAX_BEFORE = 3  # earlier ones that `learn revert` can go back to
_SOURCE = "made-from"
_LOCK_S = 10.0  # others hold it for milliseconds
_NAME = re.compile(r"[\w-][\w.-]{0,63}")
_TAKEN = ("auto", "none")


def folder_of(model: str, cache: Path) -> Path:
    """The folder of a model's adapters, by the user's name of the model; it may not exist."""
    return cache / "adapters" / model.replace("%", "%25").replace("/", "%2F")


def home_of(name: str, model: str, cache: Path) -> Path:
    """The folder of one adapter. Raises OptionError for what is no name."""
    if not _NAME.fullmatch(name) or name in _TAKEN or name.endswith(".gguf"):
        raise OptionError(
            f"'{name[:80]}' cannot be the name of an adapter.",
            hint="Use letters, digits, - and _, for example: reviews.",
        )
    return folder_of(model, cache) / name


def all_adapters(cache: Path) -> dict[str, list[str]]:
    """The names of all adapters, by the names of their models."""
    found: dict[str, list[str]] = {}
    for path in sorted((cache / "adapters").glob(f"*/[!.]*/{FILE}")):
        found.setdefault(unquote(path.parent.parent.name), []).append(path.parent.name)
    return found


def made_from(folder: Path, model: str, cache: Path) -> list[str]:
    """The names of a model's adapters that were made from the lessons in a folder."""
    homes = [path.parent for path in folder_of(model, cache).glob(f"[!.]*/{FILE}")]
    return sorted(home.name for home in homes if _source_of(home) == folder.resolve())


def _source_of(home: Path) -> Path:
    noted = home / _SOURCE
    return Path(noted.read_text()) if noted.exists() else home.resolve()


def keep(data: bytes, name: str, model: str, cache: Path, source: Path | None = None) -> Path:
    """Use this adapter, made from lessons in the folder `source`, from now on; the one before is kept.

    Raises OptionError, ModelFilesError or NotEnoughDisk.
    """
    home = home_of(name, model, cache)
    with disk_errors_named(cache):
        home.mkdir(parents=True, exist_ok=True)
        with locked(home / ".lock", f"Another process is changing {home}.", _LOCK_S):
            new = home / "new.gguf"
            write_whole(new, data, 0o600)  # on the disk before anything moves
            if (home / FILE).exists():
                for number in range(MAX_BEFORE, 0, -1):
                    _move(_before(home, number - 1), _before(home, number))
            os.replace(new, home / FILE)
            write_whole(home / _SOURCE, str((source or home).resolve()).encode(), 0o600)
    return home / FILE


def revert(name: str, model: str, cache: Path) -> bool:
    """Use the adapter before this one again, or none; returns whether there was one. Raises OptionError."""
    home = home_of(name, model, cache)
    if not (home / FILE).exists():
        raise OptionError(f"{model} has no adapter '{name}'.", hint="See: skydraft models list.")
    with disk_errors_named(cache), locked(home / ".lock", f"Another process is changing {home}.", _LOCK_S):
        had_one = _before(home, 1).exists()
        if not had_one:
            (home / FILE).unlink()
        for number in range(MAX_BEFORE):
            _move(_before(home, number + 1), _before(home, number))
    return had_one


def _before(home: Path, number: int) -> Path:
    return home / (f"before-{number}.gguf" if number else FILE)


def _move(source: Path, target: Path) -> None:
    if source.exists():
        os.replace(source, target)
