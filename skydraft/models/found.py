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
    unfit: str


def models_here(where: Seq[Path]) -> list[StoredModel]:
    return [_stored(name, manifest) for name, manifest in _manifests(where).items()]


def ollama_file(name: str, where: Seq[Path]) -> Path:
    """The file of a model of Ollama. No path is made of `name`: it is looked for among what is there.

    Raises UnknownModel, or BrokenModel for what cannot be used.
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
    """By the names of their models. Of two with one name that of the first folder counts, and of the newer form."""
    manifests = dict[str, Path]()
    for root in reversed(where):
        for path in sorted(root.glob(_MANIFESTS), key=lambda path: path.parts):
            name = _short(f"{'/'.join(path.parts[-4:-1]).replace('%3A', ':')}:{path.name}")
            is_name = all(map(_PART.fullmatch, path.parts[-4:])) and not _SHADOW.fullmatch(name)
            if is_name and os.path.exists(path):  # no link to nothing
                manifests[name] = path
    return manifests


def _short(name: str) -> str:
    """As Ollama shows it: without its own host and library."""
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
    """What a manifest says that a model is made of. Raises OSError, and any other error for what is no manifest."""
    if manifest.stat().st_size > _MAX_MANIFEST:
        raise ValueError
    content = json.loads(read_file(manifest))
    if "manifests" not in content:
        return content["layers"] or ()
    by_runner = {child.get("runner"): child for child in content["manifests"]}
    child: Any = next((by_runner[runner] for runner in _RUNNERS if runner in by_runner), {"layers": ()})
    return child["layers"] if "layers" in child else _layers(blobs / f"sha256-{_sha256(child)}", blobs)


def _sha256(described: Any) -> str:
    """Nothing but hashes of a manifest becomes a path."""
    return str(_SHA256.findall(described["digest"])[0])
