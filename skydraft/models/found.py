"""Models of Ollama on this machine, used in place. Files are not hashed, since their names are their hashes."""

import json
import os
import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skydraft.errors import BrokenModel, UnknownModel
from skydraft.files import read_file

OLLAMA = "ollama:"
_MANIFESTS = "manifests*/*/*/*/*"  # Ollama 0.40 and later use manifests-v2, which wins over manifests
_SHA256 = re.compile(r"[0-9a-f]{64}$")
_PART = re.compile(r"\w[\w.:%-]*", re.ASCII)  # a part of a manifest's path
_MAX_MANIFEST = 1 << 20
_RUNNERS = ("llamacpp", "ggml", "ollama")  # if a manifest has files for several, the one that llama.cpp reads best
_SHADOW = re.compile(r"llamacpp:[0-9a-f]{64}")  # names that Ollama 0.40 leaves for earlier versions


def places() -> list[Path]:
    """Return Ollama's folders for this user. It reads the environment, so call it in the outermost layer."""
    if given := os.environ.get("OLLAMA_MODELS", "").strip(" \"'"):
        return [Path(given)]
    services = Path("/usr/share/ollama/.ollama/models"), Path("/var/lib/ollama")  # Ollama as a Linux service
    return [Path(os.path.expanduser("~/.ollama/models")), *services]


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model of Ollama. `spec` is its model argument; `unfit` says why it cannot be used, or is ""."""

    spec: str
    path: Path
    bytes: int
    unfit: str


def models_here(where: Seq[Path]) -> list[StoredModel]:
    return [_stored(name, manifest) for name, manifest in _manifests(where).items()]


def ollama_file(name: str, where: Seq[Path]) -> Path:
    """Return the file of an Ollama model. `name` is only compared with existing models, and never becomes a path.

    Raises UnknownModel, or BrokenModel if the model cannot be used.
    """
    wanted = _short(name if name.rfind(":") > name.rfind("/") else f"{name}:latest").lower()
    manifests = _manifests(where)
    match = next((stored for stored in manifests if stored.lower() == wanted), None)
    if match is None:
        folders = ", ".join(str(root) for root in where)
        hint = f"It has {', '.join(list(manifests)[:20])}." if manifests else "OLLAMA_MODELS names its folder."
        raise UnknownModel(f"Ollama has no model {name[:80]!r} that you can read in {folders}.", hint=hint)
    model = _stored(match, manifests[match])
    if model.unfit:
        hint = f"ollama pull {match} gets it again; a model must be one GGUF file."
        raise BrokenModel(f"{model.spec} cannot be used: {model.unfit}.", hint=hint)
    return model.path


def _manifests(where: Seq[Path]) -> dict[str, Path]:
    """Return manifests by model name. For equal names the first folder wins, then the newer form."""
    manifests = dict[str, Path]()
    for root in reversed(where):
        for path in sorted(root.glob(_MANIFESTS), key=lambda path: path.parts):
            name = _short(f"{'/'.join(path.parts[-4:-1]).replace('%3A', ':')}:{path.name}")
            is_name = all(map(_PART.fullmatch, path.parts[-4:])) and not _SHADOW.fullmatch(name)
            if is_name and os.path.exists(path):  # False for a broken link
                manifests[name] = path
    return manifests


def _short(name: str) -> str:
    """Return a name as Ollama shows it, without its own host and library."""
    return re.sub(r"^(registry\.ollama\.ai/|ollama\.com/)?(library/)?", "", name)


def _stored(name: str, manifest: Path) -> StoredModel:
    path, num_bytes, blobs = manifest, 0, manifest.parents[4] / "blobs"
    try:
        layers = {layer["mediaType"].rpartition(".")[2]: layer for layer in _layers(manifest, blobs)}
        if "model" not in layers or "adapter" in layers:
            unfit = "it is not one GGUF file"
        else:
            path = blobs / f"sha256-{_sha256(layers['model'])}"
            num_bytes = path.stat().st_size
            unfit = "" if num_bytes == layers["model"]["size"] else "its file is incomplete"
    except OSError as error:
        unfit = f"its files cannot be read ({error.strerror})"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        unfit = "its manifest is damaged"
    return StoredModel(f"{OLLAMA}{name}", path, num_bytes, unfit)


def _layers(manifest: Path, blobs: Path) -> Any:
    """Return the layers of a model from its manifest. Raises OSError, and any other error for an invalid manifest."""
    if manifest.stat().st_size > _MAX_MANIFEST:
        raise ValueError
    content = json.loads(read_file(manifest))
    if "manifests" not in content:
        return content["layers"] or ()
    by_runner = {child.get("runner"): child for child in content["manifests"]}
    child: Any = next((by_runner[runner] for runner in _RUNNERS if runner in by_runner), {"layers": ()})
    return child["layers"] if "layers" in child else _layers(blobs / f"sha256-{_sha256(child)}", blobs)


def _sha256(described: Any) -> str:
    """Return the hash in a digest. Only hashes of a manifest become paths."""
    return str(_SHA256.findall(described["digest"])[0])
