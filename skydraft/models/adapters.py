"""The adapters of each model: `adapters/MODEL/NAME/adapter.gguf`, with earlier versions beside it."""

import os
from pathlib import Path
from urllib.parse import unquote

from skydraft.errors import OptionError
from skydraft.files import ADAPTER, adapters_in, is_adapter_name, write_whole
from skydraft.models.cache import disk_errors_named, locked

MAX_BEFORE = 3  # earlier versions for `learn revert`
LAST_RUN, IN_USE = "last-run", "is in use"  # the note of the last `learn run`, and its words for success
_LOCK_S = 10.0  # other processes hold it for milliseconds


def folder_of(model: str, cache: Path) -> Path:
    """Return the folder of a model's adapters, by the user's name for the model; it may not exist."""
    name = model.replace("%", "%25").replace("/", "%2F")
    return cache / "adapters" / (name if name.strip(".") else name.replace(".", "%2E"))


def home_of(name: str, model: str, cache: Path) -> Path:
    """Return the folder of one adapter. Raises OptionError for an invalid name."""
    if not is_adapter_name(name):
        hint = "Use letters, digits, - and _, for example: reviews."
        raise OptionError(f"'{name[:80]}' cannot be the name of an adapter.", hint=hint)
    return folder_of(model, cache) / name


def shipped(name: str) -> Path:
    """Return the file of an adapter in the package, for the draft model of the default pair."""
    return Path(__file__).parent / "shipped_adapters" / f"{name}.gguf"


def all_adapters(cache: Path) -> dict[str, list[str]]:
    """Return the names of all adapters, by model."""
    found = {unquote(folder.name): adapters_in(folder) for folder in sorted((cache / "adapters").glob("*"))}
    return {model: names for model, names in found.items() if names}


def keep(data: bytes, name: str, model: str, cache: Path) -> Path:
    """Use this adapter from now on; the version before is kept. A repeated call changes nothing.

    Raises OptionError, ModelFilesError or NotEnoughDisk.
    """
    home = home_of(name, model, cache)
    used = home / ADAPTER
    with disk_errors_named(cache), locked(home / ".lock", f"Another process is changing {home}.", _LOCK_S):
        if used.exists() and used.read_bytes() != data:
            earlier = _earlier(home)
            number = int(earlier[0].stem.partition("-")[2]) + 1 if earlier else 1
            write_whole(home / f"before-{number}.gguf", used.read_bytes(), 0o600)
            for path in earlier[MAX_BEFORE - 1 :]:
                path.unlink()
        write_whole(used, data, 0o600)
    return used


def revert(name: str, model: str, cache: Path) -> bool:
    """Go back to the version before, or to no adapter; returns whether there was one. Raises OptionError."""
    home = home_of(name, model, cache)
    used, note = home / ADAPTER, home / LAST_RUN
    if not used.exists():
        raise OptionError(f"{model} has no adapter '{name}'.", hint="See: skydraft models list.")
    with disk_errors_named(cache), locked(home / ".lock", f"Another process is changing {home}.", _LOCK_S):
        earlier = _earlier(home)
        if not earlier:
            used.unlink(missing_ok=True)
            note.unlink(missing_ok=True)
            return False
        if note.exists():  # otherwise a timer would learn the same again
            write_whole(note, note.read_text().replace(IN_USE, "was taken back").encode(), 0o600)
        os.replace(earlier[0], used)
    return True


def _earlier(home: Path) -> list[Path]:
    """Return earlier versions, the newest first. Delete a copy of the current one, left by a killed process."""
    found = sorted(home.glob("before-*.gguf"), key=lambda path: int(path.stem.partition("-")[2]), reverse=True)
    while found and (home / ADAPTER).exists() and found[0].read_bytes() == (home / ADAPTER).read_bytes():
        found.pop(0).unlink()
    return found
