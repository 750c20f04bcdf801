"""The adapters that models are used with until `skydraft learn revert`: for each model a folder with one file."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from skydraft.errors import OptionError
from skydraft.files import write_whole
from skydraft.models.cache import disk_errors_named, locked

_LOCK_S = 10.0  # others hold it for milliseconds


def applied(model: str, cache: Path) -> Path | None:
    return max(_adapters(model, cache), key=_written_at, default=None)


def all_applied(cache: Path) -> dict[str, Path]:
    names = [unquote(folder.name) for folder in sorted((cache / "adapters").glob("*"))]
    return {name: path for name in names if (path := applied(name, cache))}


def apply(adapter: Path, model: str, cache: Path) -> None:
    """Use a model with a copy of this file from now on. Raises ModelFilesError or NotEnoughDisk."""
    folder = _folder(model, cache)
    copy = folder / f"{adapter.stem.lstrip('.')}.gguf"
    with disk_errors_named(cache):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock", f"Another process is changing {folder}.", _LOCK_S):
            write_whole(copy, adapter.read_bytes(), 0o600)
            for path in _adapters(model, cache):
                if path != copy:
                    path.unlink(missing_ok=True)


def revert(model: str, cache: Path) -> None:
    """Use a model as it was. Raises OptionError where no adapter is applied, ModelFilesError."""
    if not (files := _adapters(model, cache)):
        raise OptionError(f"No adapter is applied to {model}.", hint="Name the model with --edge-model.")
    with disk_errors_named(cache):
        for path in files:
            path.unlink(missing_ok=True)


def _adapters(model: str, cache: Path) -> list[Path]:
    return [path for path in _folder(model, cache).glob("[!.]*.gguf") if path.is_file()]


def _written_at(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0  # another process may just have deleted it


def _folder(model: str, cache: Path) -> Path:
    return cache / "adapters" / model.replace("%", "%25").replace("/", "%2F")
