"""Turns a model argument, such as `--edge-model NAME`, into files on this disk."""

import os
import re
from pathlib import Path

from skydraft.errors import BrokenModel, NetworkUnavailable, UnknownModel, telling
from skydraft.models import manifest, sources
from skydraft.models.cache import made_models
from skydraft.models.fetch import fetch_model
from skydraft.models.found import OLLAMA, ollama_file, places
from skydraft.models.sources import Progress, SourceName, no_progress

_GGUF_MAGIC = b"GGUF"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILE = re.compile(rf"({HUB_ID.pattern})/([\w.-]+(?:/[\w.-]+)*\.gguf)")

# Packaged toys with a real architecture, so that speech works offline: a synthetic test bed.
EMBEDDED = {"tiny-omni-edge": "tiny_omni/edge", "tiny-omni-cloud": "tiny_omni/cloud"}


def resolve(
    spec: str, cache: Path, *, offline: bool = False, source: SourceName = "auto", progress: Progress = no_progress
) -> Path | None:  # fmt: skip
    """Return the .gguf file or checkpoint folder of `spec`, downloaded if needed; None for a toy.

    It tries in this order: a toy, such as toy:drift=0.4; `ollama:NAME[:TAG]`; an embedded model; a known name; a model
    that was quantized here; an existing file or folder; a hub file `org/name/file.gguf`; a hub checkpoint `org/name`.
    Raises UnknownModel, BrokenModel, and the errors of `fetch_model`.
    """
    local = Path(os.path.expanduser(spec))  # an unknown ~user stays
    if spec.partition(":")[0] == "toy":
        return None
    if spec.startswith(OLLAMA):
        return _gguf(ollama_file(spec.removeprefix(OLLAMA), places()))
    if spec in EMBEDDED:
        return embedded_path(spec)
    if spec in manifest.KNOWN:
        return fetch_model(manifest.KNOWN[spec], cache, progress=progress, offline=offline, source=source)
    with telling(UnknownModel, f"{spec!r} cannot be read", "Check its name."):
        if made := made_models(cache).get(spec):
            return _gguf(made)
        if spec and local.is_dir():
            return _from_folder(local)
        if spec and local.exists():
            return _gguf(local)
        # If the folder exists here, a missing file in it is a typo, not a file on the hub.
        match = None if local.parent.is_dir() else HUB_FILE.fullmatch(spec)
    if match:
        return _gguf(_fetch_hub_file(match[1], match[2], offline))
    if HUB_ID.fullmatch(spec) and local.suffix != ".gguf":
        return _from_folder(sources.hub_folder(spec, offline))
    raise _unknown(spec, local)


def embedded_path(name: str) -> Path:
    return Path(__file__).parent / EMBEDDED[name]


def _fetch_hub_file(repo: str, file: str, offline: bool) -> Path:
    cached = sources.hub_cached(repo, file)
    if offline and not cached:
        message = f"{repo}/{file} is not in the Hugging Face cache, and nothing is downloaded offline."
        raise NetworkUnavailable(message, hint="Go online once, or give the path of a .gguf file.")
    return cached or sources.hub_file(repo, file)


def _gguf(path: Path) -> Path:
    """Return `path`. Raises BrokenModel if it is not a GGUF file."""
    if not path.is_file():  # reading a pipe might never end
        raise BrokenModel(f"{path} is not a regular file.", hint="Give the path of a .gguf file.")
    with telling(BrokenModel, f"{path} cannot be read", "Check its permissions."), path.open("rb") as file:
        magic = file.read(len(_GGUF_MAGIC))
    if magic != _GGUF_MAGIC:
        what = "is empty" if not magic else "does not start with GGUF"
        raise BrokenModel(f"{path} {what}, so it is not a GGUF model.", hint="Download it again, or give another file.")
    return path


def _from_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    gguf = sorted(folder.glob("*.gguf"))
    if len(gguf) == 1:
        return _gguf(gguf[0])
    if gguf:
        raise BrokenModel(f"{folder} has {len(gguf)} .gguf files.", hint=f"Name one of them, for example {gguf[0]}.")
    hint = "Give a transformers checkpoint's folder or a .gguf file; on the hub, org/name/file.gguf."
    raise BrokenModel(f"{folder} has no config.json and no .gguf file.", hint=hint)


def _unknown(spec: str, local: Path) -> UnknownModel:
    if local.suffix == ".gguf":
        message = f"There is no file {spec}."
        return UnknownModel(message, hint="Check the path; on the hub a file is org/name/file.gguf.")
    others = ", ".join(["ollama:NAME", *EMBEDDED, "toy", "a .gguf file", "a checkpoint's folder", "a hub id org/name"])
    hint = f"{manifest.name_hint(spec)} Or give {others}."
    return UnknownModel(f"{spec!r} is not a known model, file or folder.", hint=hint)
