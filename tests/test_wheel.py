"""The wheel, as a user gets it: built from a copy of the source, used where the source is not, with no network."""

from __future__ import annotations

import configparser
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

from skydraft import __version__

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TOYS = ["--edge-model", "toy:drift=0.2", "--cloud-model", "toy"]
FOR_DEVELOPERS = {"all", "dev", "conformance", "tasks"}  # tasks: a dozen packages, for measuring alone
LIMIT_S = 120

# Runs at the start of each Python of the fresh environment: beyond loopback nothing can be reached.
NO_NETWORK = """
import socket
_connect = socket.socket.connect
def connect(self, address):
    if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "localhost", "::1"):
        raise OSError(101, "this test has no network")
    return _connect(self, address)
socket.socket.connect = connect
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy, so that no build folder and no metadata are left beside the source."""
    if importlib.util.find_spec("setuptools") is None:  # importing it here would meet a distutils of other tests
        pytest.skip("the build backend is not installed, and there is no network to get it")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT / "skydraft", source / "skydraft", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "skydraft_command.py"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "-w", out, source], check=True, capture_output=True, timeout=LIMIT_S)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the wheel, and with what is installed here besides skydraft."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*install, wheel], check=True, capture_output=True, timeout=LIMIT_S)
    (site,) = folder.glob("lib/python*/site-packages")
    others = folder / "others"
    others.mkdir()
    for packages in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(packages).iterdir():
            if "skydraft" not in entry.name and entry.suffix != ".pth":
                (others / entry.name).symlink_to(entry)
    (site / "others.pth").write_text(f"{others}\n")
    (site / "sitecustomize.py").write_text(NO_NETWORK)
    return folder / "bin"


def environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return kept | {"SKYDRAFT_HOME": str(home), "HF_HOME": str(home / "hub")}


def run(fresh: Path, where: Path, *command: str) -> str:
    done = subprocess.run(
        [fresh / command[0], *command[1:]],
        cwd=where, env=environment(where), capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def metadata(wheel: Path) -> Any:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {path for path in (ROOT / "skydraft").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert packed == {str(path.relative_to(ROOT)) for path in files} | {"skydraft_command.py"}
    assert {Path(name).suffix for name in packed} >= {".html", ".css", ".js", ".j2", ".json", ".safetensors", ".proto"}


def test_the_wheel_needs_no_compiler_and_names_version_and_script(wheel: Path) -> None:
    assert wheel.name == f"skydraft-{__version__}-py3-none-any.whl"
    points = configparser.ConfigParser(delimiters="=")
    with zipfile.ZipFile(wheel) as archive:
        points.read_string(archive.read(f"skydraft-{__version__}.dist-info/entry_points.txt").decode())
    assert dict(points["console_scripts"]) == PROJECT["project"]["scripts"]


def test_all_names_every_extra_that_is_for_users(wheel: Path) -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    named = re.fullmatch(r"skydraft\[([a-z,]+)\]", everything)
    assert named and set(named[1].split(",")) == set(extras) - FOR_DEVELOPERS
    assert "all" in metadata(wheel).get_all("Provides-Extra")


def test_the_changelog_has_a_section_for_this_version(wheel: Path) -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## [{__version__}]" in changelog
    assert metadata(wheel)["Version"] == __version__


def test_it_runs_where_the_source_is_not(fresh: Path, tmp_path: Path) -> None:
    place = run(fresh, tmp_path, "python", "-c", "import skydraft; print(skydraft.__file__)")
    assert Path(place.strip()).is_relative_to(fresh.parent)
    assert run(fresh, tmp_path, "skydraft", "--version") == f"skydraft, version {__version__}\n"
    told = json.loads(
        run(fresh, tmp_path, "skydraft", "generate", "你好", *TOYS, "--mode", "quality", "--json", "-n", "9")
    )
    assert told["text"] and told["stats"]["num_tokens"] == 9
    assert run(fresh, tmp_path, "skydraft", "models", "path", "tiny-omni-edge").startswith(str(fresh.parent))


def test_it_compares_and_writes_a_page(fresh: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="a page needs the extra report")
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "prompt": "语速"}\n', encoding="utf-8")
    compare = ["compare", *TOYS, "--prompts", "prompts.jsonl", "--modes", "edge,cloud,quality", "--max-new-tokens", "6"]
    run(fresh, tmp_path, "skydraft", *compare, "--out", "out")
    assert "<!doctype html>" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


@contextmanager
def gateway(fresh: Path, home: Path) -> Iterator[str]:
    child = subprocess.Popen(
        [fresh / "skydraft", "gateway", *TOYS, "--port", "0"],
        cwd=home, env=environment(home), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stderr is not None
    try:
        printed = ""
        while "Ctrl-C stops." not in printed:
            line = child.stderr.readline()
            assert line, printed
            printed += line
        yield re.findall(r"chat page\s+(http://localhost:\d+/)", printed)[0]
    finally:
        child.terminate()
        child.wait(LIMIT_S)
        child.stderr.close()


def test_its_gateway_serves_the_page_with_its_styles_and_scripts(fresh: Path, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="the gateway needs the extra gateway")
    with gateway(fresh, tmp_path) as url:
        page = urllib.request.urlopen(url, timeout=30).read().decode()
        linked = re.findall(r"""(?:src|href)="/?([^":]+\.(?:js|css))\"""", page)
        assert {Path(name).suffix for name in linked} == {".js", ".css"}
        for name in linked:
            with urllib.request.urlopen(url + name, timeout=30) as reply:
                assert reply.status == 200 and reply.read()
