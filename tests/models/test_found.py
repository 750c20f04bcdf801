"""Models of Ollama, in folders laid out as it lays them, and as nobody should."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from skydraft.errors import BrokenModel, UnknownModel
from skydraft.models import resolve
from skydraft.models.found import StoredModel, models_here, places

from .published import FakeWorld

GGUF = b"GGUF, and weights"


class Home:
    """A user's home, with what Ollama keeps in it."""

    def __init__(self, root: Path) -> None:
        self.ollama = root / ".ollama" / "models"

    def blob(self, data: bytes) -> Path:
        return self.put(f"blobs/sha256-{hashlib.sha256(data).hexdigest()}", data)

    def manifest(self, data: bytes, *, layers: Any = None, size: Any = None, kind: str = "model") -> dict[str, Any]:
        """What Ollama says of a model whose file it has."""
        digest = self.blob(data).name.replace("-", ":")
        layer = {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest}
        layer |= {"size": len(data) if size is None else size}
        template = layer | {"mediaType": "application/vnd.ollama.image.template", "digest": f"sha256:{'0' * 64}"}
        return {"schemaVersion": 2, "layers": [layer, template] if layers is None else layers}

    def pull(self, name: str, data: bytes = GGUF, **said: Any) -> Path:
        """What Ollama has of HOST/NAMESPACE/MODEL/TAG."""
        self.put(f"manifests/{name}", json.dumps(self.manifest(data, **said)).encode())
        return self.blob(data)

    def put(self, place: str, data: bytes = b"") -> Path:
        path = self.ollama / place
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
    ("qwen:0.5b", f"{OURS}/qwen/0.5b"), ("_/my", "registry.ollama.ai/_/my/latest"),
    ("hf.co/org/qwen-gguf:q4_k_m", "hf.co/Org/Qwen-GGUF/Q4_K_M"),
    ("localhost:5000/me/qwen", "localhost:5000/me/qwen/latest"),
])  # fmt: skip
def test_a_name_of_ollama_is_its_blob(name: str, manifest: str, home: Home, world: FakeWorld) -> None:
    """No byte is copied, and the file is known by its hash."""
    other, blob = home.pull("registry.ollama.ai/library/other/latest", GGUF * 2), home.pull(manifest)
    assert resolve(f"ollama:{name}", world.cache, offline=True) == blob != other
    assert not world.cache.exists()


NEW = "manifests-v2/ollama.com/library"


def test_models_of_a_newer_ollama_are_found(home: Home, world: FakeWorld) -> None:
    """It links names to manifests among the blobs, of which one may list those of several runners."""
    blobs = [home.blob(GGUF * number) for number in (2, 3, 4)]
    inline = [home.manifest(GGUF * number) | {"runner": "ggml"} for number in (2, 3, 4)]
    child = home.blob(json.dumps(home.manifest(GGUF * 3)).encode())
    home.pull(f"{OURS}/a/latest", GGUF * 2)
    for_ours = {"runner": "llamacpp", "digest": child.name.replace("-", ":", 1)}
    other = {"runner": "mlx", "digest": f"sha256:{'0' * 64}", "format": "safetensors"}
    for name, children in (
        (f"{NEW}/a", [other, inline[2]]),  # it counts, not what is left for earlier versions
        (f"{NEW}/list", [inline[0], other, for_ours]), ("manifests-v2/localhost%3A5000/me/own", [inline[0]]),
        (f"{NEW}/mlx", [other]), (f"{NEW}/lost", [for_ours | {"digest": f"sha256:{'5' * 64}"}]),
    ):  # fmt: skip
        path = home.put(f"{name}/latest")
        path.unlink()
        path.symlink_to(os.path.relpath(home.blob(json.dumps({"manifests": children}).encode()), path.parent))
    home.pull(f"{OURS}/llamacpp/{'a' * 64}", GGUF * 9)
    found = home.found()
    assert {spec: each.path for spec, each in found.items() if not each.unfit} == {
        "ollama:a:latest": blobs[2], "ollama:list:latest": blobs[1], "ollama:localhost:5000/me/own:latest": blobs[0],
    }  # fmt: skip
    assert {spec for spec, each in found.items() if each.unfit} == {"ollama:mlx:latest", "ollama:lost:latest"}
    assert resolve("ollama:ollama.com/library/list", world.cache) == blobs[1]


@pytest.mark.parametrize("name", [
    "", ":", "/", "qwen:", "../../secret", "qwen:../../../../../secret", "a/b/c/d/e:f", "*", "qwen:*", "qwen\n",
    "%2e%2e/secret", "/etc/passwd", "qwen/latest", "manifests/qwen", "x" * 5000, "\x1b[2J",
])  # fmt: skip
def test_no_name_leads_elsewhere(name: str, home: Home, world: FakeWorld) -> None:
    home.pull(f"{OURS}/qwen/latest")
    home.put("../../secret", GGUF)
    with pytest.raises(UnknownModel, match=r"Ollama has no model .*It has qwen:latest") as raised:
        resolve(f"ollama:{name}", world.cache)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 600


def layer(**changes: Any) -> list[Any]:
    return [{"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{'1' * 64}", "size": 1} | changes]


ABSENT, OTHER = layer(), [*layer(), *layer(mediaType="x.adapter")]
DAMAGED = [layer(digest="sha256:../../secret"), layer(digest=None), [1, "x"], "model"]
NO_MANIFEST = [b"", b"{", b"[" * 10**5, b"\xff\xfe", b"null", b'{"layers": {"a": 1}}', b" " * 2**21]
BROKEN: list[tuple[Any, str]] = [
    ({"layers": ABSENT}, "its files cannot be read"), ({"size": 100}, "its file is incomplete"),
    *(({"layers": each}, "its manifest is damaged") for each in DAMAGED),
    *((each, "its manifest is damaged") for each in NO_MANIFEST),
    *((each, "not one GGUF file") for each in ({"layers": []}, {"layers": OTHER}, {"kind": "tensor"})),
]  # fmt: skip


@pytest.mark.parametrize("at", range(len(BROKEN)))
def test_what_is_broken_is_one_line_and_hides_nothing_else(at: int, home: Home, world: FakeWorld) -> None:
    given, says = BROKEN[at]
    if isinstance(given, bytes):
        home.put(f"manifests/{OURS}/qwen/latest", given)
    else:
        home.pull(f"{OURS}/qwen/latest", **given)
    home.pull(f"{OURS}/good/latest", GGUF * 2)
    home.put(f"manifests/{OURS}/qwen/._latest", b"of another system")
    (home.ollama / "manifests" / OURS / "qwen" / "folder").mkdir()
    (home.ollama / "manifests" / OURS / "qwen" / "lost").symlink_to("nothing")
    found = {spec: each.unfit for spec, each in home.found().items()}
    assert says in found.pop("ollama:qwen:latest")
    assert found == {"ollama:qwen:folder": "its files cannot be read (it is not a file)", "ollama:good:latest": ""}
    with pytest.raises(BrokenModel, match=f"cannot be used: .*{says}.*ollama pull qwen:latest") as raised:
        resolve("ollama:qwen", world.cache)
    assert str(raised.value).isprintable()
