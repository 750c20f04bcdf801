"""Models of Ollama, in folders laid out as it lays them, and as nobody should."""

import hashlib
import json
import os
import random
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from skydraft.errors import BrokenModel, UnknownModel
from skydraft.models import resolve
from skydraft.models.found import StoredModel, models_here, ollama_file, places
from skydraft.models.gguf import MISSING, unfitness

from ..mutating import flipped
from .published import FakeWorld

TOKENS = ["a", "b", "<|end|>"]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def packed(value: Any) -> bytes:
    if number := {bool: (7, "?"), int: (4, "I"), float: (6, "f")}.get(type(value)):
        return struct.pack(f"<I{number[1]}", number[0], value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    is_text = isinstance(value[0], str)
    items = map(text, value) if is_text else (struct.pack("<i", each) for each in value)
    return struct.pack("<IIQ", 9, 8 if is_text else 5, len(value)) + b"".join(items)


def gguf(layers: Any = 2, size: int = 100, **changes: Any) -> bytes:
    """A header of a model with so many layers, and weights up to a size; `None` leaves a field out."""
    fields: dict[str, Any] = {
        "general.architecture": "qwen2", "general.type": "model", "qwen2.block_count": layers,
        "qwen2.embedding_length": 8, "tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.token_type": [1, 1, 3],
        "tokenizer.ggml.merges": ["a b"], "tokenizer.chat_template": "{{ messages }}",
    }  # fmt: skip
    fields = {name: value for name, value in (fields | changes).items() if value is not None}
    header = struct.pack("<4sIQQ", b"GGUF", 3, 0, len(fields))
    return (header + b"".join(text(name) + packed(value) for name, value in fields.items())).ljust(size, b"w")


class Home:
    """A user's home, with what other programs keep in it."""

    def __init__(self, root: Path) -> None:
        self.root, self.ollama = root, root / ".ollama" / "models"

    def pull(self, name: str, data: bytes | None, *, layers: Any = None, size: Any = None, kind: str = "model") -> Path:
        """What Ollama has of HOST/NAMESPACE/MODEL/TAG; without data the blob is missing."""
        sha256 = hashlib.sha256(data or name.encode()).hexdigest()
        blob, manifest = self.ollama / "blobs" / f"sha256-{sha256}", self.ollama / "manifests" / name
        for path in (blob, manifest):
            path.parent.mkdir(parents=True, exist_ok=True)
        if data is not None:
            blob.write_bytes(data)
        length = len(data or b"") if size is None else size
        layer = {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{sha256}", "size": length}
        template = layer | {"mediaType": "application/vnd.ollama.image.template", "digest": f"sha256:{'0' * 64}"}
        manifest.write_text(json.dumps({"schemaVersion": 2, "layers": [layer, template] if layers is None else layers}))
        return blob

    def put(self, place: str, data: bytes = b"") -> Path:
        path = self.root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def found(self) -> dict[str, StoredModel]:
        return {each.spec: each for each in models_here(places())}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    return Home(tmp_path)


OURS = "registry.ollama.ai/library"


@pytest.mark.parametrize(("name", "manifest"), [
    ("qwen", f"{OURS}/qwen/latest"), ("qwen:latest", f"{OURS}/qwen/latest"), ("QWEN", f"{OURS}/qwen/latest"),
    ("library/qwen", f"{OURS}/qwen/latest"), (f"{OURS}/qwen", f"{OURS}/qwen/latest"),
    ("qwen:0.5b", f"{OURS}/qwen/0.5b"),
    ("me/qwen:1", "registry.ollama.ai/me/qwen/1"), ("_/my", "registry.ollama.ai/_/my/latest"),
    ("hf.co/Org/Qwen-GGUF:Q4_K_M", "hf.co/Org/Qwen-GGUF/Q4_K_M"),
    ("hf.co/org/qwen-gguf:q4_k_m", "hf.co/Org/Qwen-GGUF/Q4_K_M"),
    ("localhost:5000/me/qwen", "localhost:5000/me/qwen/latest"),
])  # fmt: skip
def test_a_name_of_ollama_is_its_blob(name: str, manifest: str, home: Home, world: FakeWorld) -> None:
    """No byte is copied, and the file is known by its hash."""
    other = home.pull("registry.ollama.ai/library/other/latest", gguf(9))
    blob = home.pull(manifest, gguf())
    found = resolve(f"ollama:{name}", world.cache, offline=True)
    assert found == blob != other
    assert not world.cache.exists() and hashlib.sha256(blob.read_bytes()).hexdigest() in blob.name


LIST = "application/vnd.ollama.manifest.list.v2+json"
NEW = "../manifests-v2/ollama.com/library"


def linked(home: Home, name: str, children: list[dict[str, Any]]) -> None:
    """A name as Ollama 0.40 keeps it: a link to a blob with a manifest for each runner."""
    data = json.dumps({"schemaVersion": 2, "mediaType": LIST, "manifests": children}).encode()
    blob = home.put(f".ollama/models/blobs/sha256-{hashlib.sha256(data).hexdigest()}", data)
    path = home.ollama / "manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(blob, path.parent))


def test_models_of_a_newer_ollama_are_found(home: Home) -> None:
    """It links names to manifests among the blobs, of which one may list those of several runners."""
    blobs = [home.pull(f"{OURS}/{name}/latest", gguf(number)) for number, name in enumerate("abc", 2)]
    manifests = [home.ollama / "manifests" / OURS / name / "latest" for name in "abc"]
    inline = [json.loads(path.read_text()) | {"runner": "ggml"} for path in manifests]
    child = home.put(f".ollama/models/blobs/sha256-{hashlib.sha256(manifests[1].read_bytes()).hexdigest()}",
                     manifests[1].read_bytes())  # fmt: skip
    other = {"runner": "mlx", "digest": f"sha256:{'0' * 64}", "format": "safetensors"}
    for path in manifests[1:]:
        path.unlink()
    home.pull(f"{NEW}/plain/1b", gguf(9))
    linked(home, f"{NEW}/a/latest", [other, inline[2]])  # it counts, not what is left for earlier versions
    for_ours = {"runner": "llamacpp", "digest": child.name.replace("-", ":", 1)}
    linked(home, f"{NEW}/list/latest", [inline[0], other, for_ours])
    linked(home, f"{NEW}/mlx/latest", [other])
    linked(home, "../manifests-v2/localhost%3A5000/me/own/latest", [inline[0]])
    linked(home, f"{NEW}/lost/latest", [{"runner": "ggml", "digest": f"sha256:{'5' * 64}"}])
    home.pull(f"{OURS}/llamacpp/{'a' * 64}", gguf(9))
    (home.ollama / "manifests" / f"{NEW}/gone").mkdir()
    (home.ollama / "manifests" / f"{NEW}/gone/latest").symlink_to("../nothing")
    found = home.found()
    assert {spec[7:]: each.path for spec, each in found.items() if not each.unfit} == {
        "a:latest": blobs[2], "list:latest": blobs[1], "plain:1b": found["ollama:plain:1b"].path,
        "localhost:5000/me/own:latest": blobs[0],
    }  # fmt: skip
    unfit = {spec[7:]: each.unfit for spec, each in found.items() if each.unfit}
    assert unfit.keys() == {"mlx:latest", "lost:latest"} and "no GGUF" in unfit["mlx:latest"]
    for name, blob in (("A", blobs[2]), ("ollama.com/library/list", blobs[1]), ("localhost:5000/me/own", blobs[0])):
        assert ollama_file(name, places()) == blob


@pytest.mark.parametrize("name", [
    "", ":", "/", "qwen:", "../../secret", f"{OURS}/../../../secret", "qwen:../../../../../secret", "a/b/c/d/e:f",
    "*", "qwen:*", "qwen\n", "%2e%2e/secret", "/etc/passwd", "qwen/latest", "manifests/qwen", "x" * 5000, "\x1b[2J",
])  # fmt: skip
def test_no_name_leads_elsewhere(name: str, home: Home, world: FakeWorld) -> None:
    home.pull(f"{OURS}/qwen/latest", gguf())
    home.put("secret", gguf())
    with pytest.raises(UnknownModel, match="Ollama has no model") as raised:
        resolve(f"ollama:{name}", world.cache)
    assert "It has qwen:latest" in raised.value.hint
    assert str(raised.value).isprintable() and len(str(raised.value)) < 400


def layer(**changes: Any) -> list[Any]:
    return [{"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{'1' * 64}", "size": 1} | changes]


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "adapter": ({"general.type": "adapter"}, "adapter"), "projector": ({"general.type": "mmproj"}, "projector"),
    "an old projector": ({"general.architecture": "clip", "general.type": None}, "projector"),
    "a part": ({"split.count": 3}, "several parts"), "pooling": ({"qwen2.pooling_type": 3}, "embedding"),
    "both ways": ({"qwen2.attention.causal": False}, "embedding"),
    "Ollama's own form": ({"qwen2.vision.block_count": 2}, "only Ollama reads"),
    "its own name": ({"general.architecture": "gptoss"}, "only Ollama reads"),
    "pictures": ({"tokenizer.ggml.tokens": None}, "no language model"),
    "strange": ({"tokenizer.ggml.tokens": 7}, "no language"),
}  # fmt: skip
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no blob": ({"data": None}, "its file is missing; get it again: ollama pull qwen:latest"),
    "half a blob": ({"data": gguf()[:50], "size": 100}, "its file is incomplete; get it"),
    "no GGUF": ({"data": b"<html>"}, "its file is damaged"),
    "a cut header": ({"data": gguf()[:300]}, "its file is damaged"),
    "another digest": ({"data": gguf(), "layers": layer(digest="sha256:../../secret")}, "manifest is damaged"),
    "no digest": ({"data": gguf(), "layers": layer(digest=None)}, "manifest is damaged"),
    "other layers": ({"data": gguf(), "layers": [1, "x"]}, "manifest is damaged"),
    "a word": ({"data": gguf(), "layers": "model"}, "manifest is damaged"),
    "in the cloud": ({"data": gguf(), "layers": []}, "no GGUF file belongs to it"),
    "other weights": ({"data": gguf(), "kind": "tensor"}, "no GGUF file belongs to it"),
    "an adapter too": ({"data": gguf(), "layers": [*layer(), *layer(mediaType="x.adapter")]}, "it has an adapter"),
    **{kind: ({"data": gguf(**changes)}, says) for kind, (changes, says) in UNFIT.items()},
}  # fmt: skip


@pytest.mark.parametrize("how", BROKEN)
def test_what_is_broken_is_one_line_and_hides_nothing_else(how: str, home: Home, world: FakeWorld) -> None:
    given, says = BROKEN[how]
    home.pull(f"{OURS}/qwen/latest", **given)
    home.pull(f"{OURS}/good/latest", gguf())
    found = home.found()
    assert says in found["ollama:qwen:latest"].unfit and not found["ollama:good:latest"].unfit
    with pytest.raises(BrokenModel, match="cannot be used: ") as raised:
        resolve("ollama:qwen", world.cache)
    assert says in str(raised.value) and str(raised.value).isprintable()


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 10**5, b"\xff\xfe", b"null", b'{"layers": {"a": 1}}', b" " * 2**21])
def test_a_manifest_that_is_none_is_said(data: bytes, home: Home) -> None:
    home.put(f".ollama/models/manifests/{OURS}/qwen/latest", data)
    home.put(f".ollama/models/manifests/{OURS}/qwen/._latest", b"of another system")
    (home.ollama / "manifests" / OURS / "qwen" / "folder").mkdir()
    assert {spec: each.unfit.partition(";")[0] for spec, each in home.found().items()} == {
        "ollama:qwen:latest": "its manifest is damaged",
        "ollama:qwen:folder": "its manifest cannot be read (it is not a file)",
    }


@contextmanager
def as_no_root() -> Iterator[None]:
    """Nobody is kept out who is root."""
    os.seteuid(os.getuid() or 65534)
    try:
        yield
    finally:
        os.seteuid(os.getuid())


def test_a_folder_of_another_user_is_said() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        home = Home(root)
        home.pull(f"{OURS}/closed/latest", gguf()).chmod(0)
        home.put("shut/.keep").parent.chmod(0)
        with as_no_root():
            found = {each.spec: each.unfit for each in models_here([home.ollama, root / "shut"])}
            with pytest.raises(UnknownModel, match="Permission denied"):
                ollama_file("qwen", [root / "shut"])
    assert found["ollama:closed:latest"] == "its file cannot be read (Permission denied)"
    assert found[str(root / "shut")].startswith("it cannot be read (Permission denied)")


def test_a_header_is_read_and_no_weight(tmp_path: Path) -> None:
    """Whatever is in it: none raises, none takes long, and a file of a terabyte takes no longer."""
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf())
    sound = unfitness(path)
    os.truncate(path, 1 << 40)
    assert unfitness(path) == sound and not sound
    rng, num_unfit, num = random.Random(46), 0, 500
    for _ in range(num):
        path.write_bytes(flipped(gguf(), rng))
        num_unfit += bool(unfitness(path))
    assert 0 < num_unfit < num
    for end in range(0, 300, 7):
        path.write_bytes(gguf()[:end])
        assert unfitness(path)
    os.mkfifo(tmp_path / "pipe.gguf")
    assert unfitness(tmp_path / "pipe.gguf") == MISSING
