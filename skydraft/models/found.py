"""Models that other programs keep on this machine. They are used where they lie; nothing is copied or hashed: Ollama
and the hub's client name each file by its hash."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from platformdirs import user_cache_dir

from skydraft.errors import BrokenModel, UnknownModel
from skydraft.files import read_file
from skydraft.models.cache import present
from skydraft.models.gguf import MISSING, Card, read_card
from skydraft.models.manifest import KNOWN

OURS, OLLAMA = "skydraft", "ollama:"
# Folders and patterns of files in them, by program.
Places = Mapping[str, Seq[tuple[Path, str]]]
_MANIFESTS = "manifests*/*/*/*/*"  # manifests-v2 since Ollama 0.40, which counts where both have a name
_SNAPSHOTS = "models--*/snapshots/*/*.gguf", "models--*/snapshots/*/*/*.gguf"
_LATER_PART = re.compile(r"-(?!0*1-)\d+-of-\d+\.gguf$")
_SHA256 = re.compile(r"[0-9a-f]{64}$")
_MAX_MANIFEST = 1 << 20
_RUNNERS = ("llamacpp", "ggml", "ollama")  # of a manifest for each, by whose file llama.cpp reads best
_SHADOW = re.compile(r"llamacpp:[0-9a-f]{64}")  # names that Ollama 0.40 leaves for earlier versions


def places() -> Places:
    """Of this user. It reads the environment: call it in the outermost layer alone."""
    home, given = Path.home(), os.environ.get("OLLAMA_MODELS", "").strip(" \"'")
    services = Path("/usr/share/ollama/.ollama/models"), Path("/var/lib/ollama")  # of users of their own, on Linux
    hub, llama_cpp = Path(constants.HF_HUB_CACHE), Path(os.environ.get("LLAMA_CACHE") or user_cache_dir("llama.cpp"))
    return {
        "Ollama": [(each, _MANIFESTS) for each in ([Path(given)] if given else [home / ".ollama/models", *services])],
        "llama.cpp": [(llama_cpp, each) for each in ("*.gguf", *_SNAPSHOTS)],
        "Hugging Face": [(hub, each) for each in _SNAPSHOTS],
    }


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model of a program; `spec` names it as a model argument."""

    spec: str
    owner: str
    path: Path
    bytes: int
    card: Card


def models_here(cache: Path, where: Places) -> list[StoredModel]:
    """Our own known models, then those of other programs, each file once. What cannot be used says why."""
    own = ((each, present(each, cache)) for each in KNOWN.values())
    found = [StoredModel(each.name, OURS, path, each.bytes, read_card(path)) for each, path in own if path]
    for owner, root, pattern in ((owner, *place) for owner, folders in where.items() for place in folders):
        if fault := _fault_of(root):
            found.append(StoredModel(f"{root}", owner, root, 0, Card(fault)))
        in_ollama = map(_in_ollama, _manifests(root).values())
        found += in_ollama if pattern == _MANIFESTS else _in_folder(owner, root, pattern)
    once: dict[str, StoredModel] = {}
    for each in found:
        real = os.path.realpath(each.path)
        once.setdefault((_SHA256.findall(real) or [real])[0], each)
    return list(once.values())


def ollama_file(name: str, where: Places) -> Path:
    """The file of a model of Ollama. No path is made of `name`: it is looked for among what is there.

    Raises UnknownModel, or BrokenModel for what cannot be used.
    """
    wanted = _short(name if name.rfind(":") > name.rfind("/") else f"{name}:latest").lower()
    roots = [root for root, _ in where["Ollama"]]
    manifests = {name: path for root in reversed(roots) for name, path in _manifests(root).items()}
    if path := next((path for each, path in manifests.items() if each.lower() == wanted), None):
        found = _in_ollama(path)
        if unfit := found.card.unfit:
            raise BrokenModel(f"{found.spec} cannot be used: {unfit}.", hint="See: skydraft models list.")
        return found.path
    faults = [f"{root}: {fault}." for root in roots if (fault := _fault_of(root))]
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
    named = {
        _name_of(path): path
        for path in found
        if path.exists() and all(re.fullmatch(r"\w[\w.:%-]*", part, re.ASCII) for part in path.parts[-4:])
    }
    return {name: path for name, path in named.items() if not _SHADOW.fullmatch(name)}


def _name_of(manifest: Path) -> str:
    return _short(f"{'/'.join(manifest.parts[-4:-1]).replace('%3A', ':')}:{manifest.name}")


def _short(name: str) -> str:
    """As Ollama shows it: without its own host and library."""
    return re.sub(r"^(registry\.ollama\.ai/|ollama\.com/)?(library/)?", "", name)


def _in_ollama(manifest: Path) -> StoredModel:
    name, root = _name_of(manifest), manifest.parents[4]
    spec, again = f"{OLLAMA}{name}", f"; get it again: ollama pull {name}"
    fault = f"its manifest is damaged{again}"
    try:
        layers = {each["mediaType"].rpartition(".")[2]: each for each in _layers(manifest, root / "blobs")}
        model = layers.get("model", {"digest": "0" * 64, "size": 0})
        sha256, size = _SHA256.findall(model["digest"])[0], model["size"]
        fault = (
            "it has an adapter" if "adapter" in layers else "" if "model" in layers else "no GGUF file belongs to it"
        )
    except OSError as error:
        fault = f"its manifest cannot be read ({error.strerror})"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    if fault:
        return StoredModel(spec, "Ollama", manifest, 0, Card(fault))
    path = root / "blobs" / f"sha256-{sha256}"  # nothing but hashes of a manifest becomes a path
    card, num_bytes = read_card(path), _bytes_of(path)
    if card == MISSING or (num_bytes and num_bytes != size):
        card = Card(f"its file is {'incomplete' if num_bytes else 'missing'}{again}")
    return StoredModel(spec, "Ollama", path, num_bytes, card)


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


def _in_folder(owner: str, root: Path, pattern: str) -> Iterator[StoredModel]:
    for path in [] if _fault_of(root) else sorted(root.glob(pattern)):
        if not str(path).isprintable():
            yield StoredModel(ascii(str(path)), owner, path, 0, Card("its name has characters that are not printed"))
        elif not _LATER_PART.search(path.name):
            yield StoredModel(f"{path}", owner, path, _bytes_of(path), read_card(path))


def _bytes_of(path: Path) -> int:
    return path.stat().st_size if os.access(path, os.R_OK) else 0
