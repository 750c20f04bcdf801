"""Our folder of model files. `models/<file>` exists only after its sha256 was checked.

A file is written or linked under a `.partial` name, hashed, and renamed. So later checks compare only the size.
"""

import hashlib
import os
import re
from contextlib import AbstractContextManager
from pathlib import Path

from platformdirs import user_cache_dir

from skydraft.errors import HashMismatch, ModelFilesError, OptionError, telling_of_disk
from skydraft.files import lock_file
from skydraft.models import manifest
from skydraft.models.manifest import KnownModel

_SEPARATOR = re.compile("[/:]")


def cache_dir() -> Path:
    """Return SKYDRAFT_HOME, or the user's cache folder. It reads the environment, so call it in the outermost layer.

    Raises OptionError if the user has no home folder.
    """
    try:
        return Path(os.environ.get("SKYDRAFT_HOME") or user_cache_dir("skydraft")).expanduser().absolute()
    except RuntimeError as error:
        hint = "Set SKYDRAFT_HOME to a folder for files of skydraft."
        raise OptionError("This user has no home folder.", hint=hint) from error


def model_path(model: KnownModel, cache: Path, end: str = "") -> Path:
    """Return the path of the checked file; with `end` .partial or .lock, of its temporary file or lock."""
    return cache / "models" / f"{model.file}{end}"


def named_path(name: str, cache: Path, end: str = "") -> Path:
    """Return the same path by name, for a known model or one that was or will be made here."""
    model = manifest.KNOWN.get(name)
    return model_path(model, cache, end) if model else cache / "models" / f"{_SEPARATOR.sub('-', name)}.gguf{end}"


def made_models(cache: Path) -> dict[str, Path]:
    """Return the models that were made here, by name."""
    known = [model.file for model in manifest.KNOWN.values()]
    return {path.stem: path for path in sorted((cache / "models").glob("*.gguf")) if path.name not in known}


def present(model: KnownModel, cache: Path) -> Path | None:
    """Return the checked file if it is present; compares only its size."""
    path = model_path(model, cache)
    return path if path.is_file() and path.stat().st_size == model.bytes else None


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def settle(model: KnownModel, cache: Path) -> Path:
    """Rename the `.partial` file into place. For a wrong hash delete it and raise HashMismatch."""
    partial = model_path(model, cache, ".partial")
    if (sha256 := sha256_of(partial)) != model.sha256:
        partial.unlink()
        says = f"{model.file} was downloaded with sha256 {sha256[:12]} instead of {model.sha256[:12]}."
        hint = f"Run `skydraft models fetch {model.name}` again; if it repeats, upgrade skydraft."
        raise HashMismatch(says, hint=hint)
    os.replace(partial, model_path(model, cache))
    return model_path(model, cache)


def locked(path: Path, busy: str, timeout_s: float = 0.0) -> AbstractContextManager[object]:
    """Return a lock for `with`. Raises ModelFilesError with the message `busy` if another process holds it longer than
    `timeout_s`."""
    return lock_file(path, ModelFilesError(busy, hint="Stop that process, or wait until it is done."), timeout_s)


def disk_errors_named(cache: Path) -> AbstractContextManager[None]:
    """Turn an OSError into NotEnoughDisk or ModelFilesError."""
    hint = "Set SKYDRAFT_HOME to a folder that you can write to and that has room."
    return telling_of_disk(ModelFilesError, f"Writing to {cache} failed", hint)
