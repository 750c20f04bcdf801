"""The models that Ollama keeps on this machine. They are used where they lie; nothing is copied or hashed, since Ollama
names each file by its hash."""

import json
import os
import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skydraft.errors import BrokenModel, UnknownModel
from skydraft.files import read_file
from skydraft.models.gguf import MISSING, unfitness

OLLAMA = "ollama:"
_MANIFESTS = "manifests*/*/*/*/*"  # manifests-v2 since Ollama 0.40, which counts where both have a name
_SHA256 = re.compile(r"[0-9a-f]{64}$")
_PART = re.compile(r"\w[\w.:%-]*", re.ASCII)  # of a manifest's path
_MAX_MANIFEST = 1 << 20
_RUNNERS = ("llamacpp", "ggml", "ollama")  # of a manifest for each, by whose file llama.cpp reads best
_SHADOW = re.compile(r"llamacpp:[0-9a-f]{64}")  # names that Ollama 0.40 leaves for earlier versions


def places() -> list[Path]:
    """Ollama's folders of this user. It reads the environment: call it in the outermost layer alone."""
    if given := os.environ.get("OLLAMA_MODELS", "").strip(" \"'"):
        return [Path(given)]
    services = Path("/usr/share/ollama/.ollama/models"), Path("/var/lib/ollama")  # of users of their own, on Linux
    return [Path(os.path.expanduser("~/.ollama/models")), *services]


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model of Ollama; `spec` names it as a model argument. `unfit` is why it cannot be used, or ""."""

    spec: str
    path: Path
    bytes: int
    unfit: str  # why it cannot be used, or ""


def models_here(where: Seq[Path]) -> list[StoredModel]:
    """What cannot be used says why."""
    closed = [StoredModel(f"{root}", root, 0, fault) for root in where if (fault := _fault_of(root))]
    return closed + [_stored(manifest) for root in where for manifest in _manifests(root).values()]


def ollama_file(name: str, where: Seq[Path]) -> Path:
    """The file of a model of Ollama. No path is made of `name`: it is looked for among what is there.

    Raises UnknownModel, or BrokenModel for what cannot be used.
    """
    wanted = _short(name if name.rfind(":") > name.rfind("/") else f"{name}:latest").lower()
    manifests = {name: path for root in reversed(where) for name, path in _manifests(root).items()}
    if path := next((path for each, path in manifests.items() if each.lower() == wanted), None):
        found = _stored(path)
        if unfit := found.unfit:
            raise BrokenModel(f"{found.spec} cannot be used: {unfit}.", hint="See: skydraft models list.")
        return found.path
    faults = [f"{root}: {fault}." for root in where if (fault := _fault_of(root))]
    known = f"It has {', '.join(list(manifests)[:20])}." if manifests else "OLLAMA_MODELS names its folder."
    raise UnknownModel(f"Ollama has no model {name[:80]!r} here.", hint=" ".join([*faults, known]))


def _fault_of(root: Path) -> str:
    """Why a folder that is there cannot be read, or ""."""
    try:
        os.listdir(root)
    except OSError as error:
        is_absent = isinstance(error, FileNotFoundError | NotADirectoryError)
        return "" if is_absent else f"it cannot be read ({error.strerror}); its owner may let you in"
    return ""


def _manifests(root: Path) -> dict[str, Path]:
    """By the names of their models."""
    found = [] if _fault_of(root) else sorted(root.glob(_MANIFESTS), key=lambda path: path.parts)
    usable = (path for path in found if path.exists() and all(map(_PART.fullmatch, path.parts[-4:])))
    return {name: path for path in usable if not _SHADOW.fullmatch(name := _name_of(path))}


def _name_of(manifest: Path) -> str:
    return _short(f"{'/'.join(manifest.parts[-4:-1]).replace('%3A', ':')}:{manifest.name}")


def _short(name: str) -> str:
    """As Ollama shows it: without its own host and library."""
    return re.sub(r"^(registry\.ollama\.ai/|ollama\.com/)?(library/)?", "", name)


def _stored(manifest: Path) -> StoredModel:
    name, root = _name_of(manifest), manifest.parents[4]
    spec, again = f"{OLLAMA}{name}", f"; get it again: ollama pull {name}"
    fault = f"its manifest is damaged{again}"
    try:
        layers = {each["mediaType"].rpartition(".")[2]: each for each in _layers(manifest, root / "blobs")}
        model = layers.get("model", {"digest": "0" * 64, "size": 0})
        sha256, size = _SHA256.findall(model["digest"])[0], model["size"]
        fault = "" if "model" in layers else "no GGUF file belongs to it"
        fault = "it has an adapter" if "adapter" in layers else fault
    except OSError as error:
        fault = f"its manifest cannot be read ({error.strerror})"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    if fault:
        return StoredModel(spec, manifest, 0, fault)
    path = root / "blobs" / f"sha256-{sha256}"  # nothing but hashes of a manifest becomes a path
    unfit, num_bytes = unfitness(path), path.stat().st_size if os.access(path, os.R_OK) else 0
    if unfit == MISSING or (num_bytes and num_bytes != size):
        unfit = f"its file is {'incomplete' if num_bytes else 'missing'}{again}"
    return StoredModel(spec, path, num_bytes, unfit)


def _layers(manifest: Path, blobs: Path) -> Any:
    """What a manifest says that a model is made of. Raises OSError, and any other error for what is no manifest."""
    if manifest.stat().st_size > _MAX_MANIFEST:
        raise ValueError
    given = json.loads(read_file(manifest))
    if "manifests" not in given:
        return given["layers"] or ()
    by_runner = {each.get("runner"): each for each in given["manifests"]}
    child: Any = next((by_runner[runner] for runner in _RUNNERS if runner in by_runner), {"layers": ()})
    if "layers" in child:
        return child["layers"]
    return _layers(blobs / f"sha256-{_SHA256.findall(child['digest'])[0]}", blobs)
