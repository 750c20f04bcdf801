"""The adapters of each model: `adapters/MODEL/NAME/adapter.gguf`, and beside it the ones before."""

import os
from pathlib import Path
from urllib.parse import unquote

from skydraft.errors import OptionError
from skydraft.files import ADAPTER, adapters_in, is_adapter_name, write_whole
from skydraft.models.cache import disk_errors_named, locked

MAX_BEFORE = 3  # earlier ones that `learn revert` can go back to
LAST_RUN, IN_USE = "last-run", "is in use"  # what `learn run` did last, and what it says there
_LOCK_S = 10.0  # others hold it for milliseconds


def folder_of(model: str, cache: Path) -> Path:
    """The folder of a model's adapters, by the user's name of the model; it may not exist."""
    name = model.replace("%", "%25").replace("/", "%2F")
    return cache / "adapters" / (name if name.strip(".") else name.replace(".", "%2E"))


def home_of(name: str, model: str, cache: Path) -> Path:
    """The folder of one adapter. Raises OptionError for what is no name."""
    if not is_adapter_name(name):
        hint = "Use letters, digits, - and _, for example: reviews."
        raise OptionError(f"'{name[:80]}' cannot be the name of an adapter.", hint=hint)
    return folder_of(model, cache) / name


def all_adapters(cache: Path) -> dict[str, list[str]]:
    """The names of all adapters, by the names of their models."""
    found = {unquote(folder.name): adapters_in(folder) for folder in sorted((cache / "adapters").glob("*"))}
    return {model: names for model, names in found.items() if names}


def keep(data: bytes, name: str, model: str, cache: Path) -> Path:
    """Use this adapter from now on; the one before is kept. Twice does it once.

    Raises OptionError, ModelFilesError or NotEnoughDisk.
    """
    home = home_of(name, model, cache)
    with disk_errors_named(cache):
        home.mkdir(parents=True, exist_ok=True)
        if (home / ADAPTER).exists() and (home / ADAPTER).read_bytes() == data:
            return home / ADAPTER
        with locked(home / ".lock", f"Another process is changing {home}.", _LOCK_S):
            _drop_half(home)
            new, copy = home / "new.gguf", home / "copy.gguf"
            # All that needs room comes before anything moves, and at no moment there is none in use.
            write_whole(new, data, 0o600)
            if (home / ADAPTER).exists():
                write_whole(copy, (home / ADAPTER).read_bytes(), 0o600)
                for number, path in reversed([*enumerate(_earlier(home)[: MAX_BEFORE - 1], 2)]):
                    os.replace(path, _before(home, number))
                os.replace(copy, _before(home, 1))
            os.replace(new, home / ADAPTER)
    return home / ADAPTER


def revert(name: str, model: str, cache: Path) -> bool:
    """Use the adapter before this one again, or none; returns whether there was one. Raises OptionError."""
    home = home_of(name, model, cache)
    _check_there(home, name, model)
    with disk_errors_named(cache), locked(home / ".lock", f"Another process is changing {home}.", _LOCK_S):
        _check_there(home, name, model)  # another process may have taken it back
        _drop_half(home)
        earlier, note = _earlier(home), home / LAST_RUN
        if not earlier:
            (home / ADAPTER).unlink()
            note.unlink(missing_ok=True)
        elif note.exists():  # else a timer would learn the same again
            write_whole(note, note.read_text().replace(IN_USE, "was taken back").encode(), 0o600)
        for number, path in enumerate(earlier):
            os.replace(path, _before(home, number))
    return bool(earlier)


def _drop_half(home: Path) -> None:
    """What a kill left of a replacement: the adapter in use as the one before it, too."""
    first = _before(home, 1)
    if first.exists() and (home / ADAPTER).exists() and first.read_bytes() == (home / ADAPTER).read_bytes():
        first.unlink()


def _check_there(home: Path, name: str, model: str) -> None:
    if not (home / ADAPTER).exists():
        raise OptionError(f"{model} has no adapter '{name}'.", hint="See: skydraft models list.")


def _before(home: Path, number: int) -> Path:
    return home / (f"before-{number}.gguf" if number else ADAPTER)


def _earlier(home: Path) -> list[Path]:
    """Those before, the newest first; a kill while they move leaves a gap."""
    return [path for number in range(1, MAX_BEFORE + 1) if (path := _before(home, number)).exists()]
