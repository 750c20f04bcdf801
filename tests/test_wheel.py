"""The wheel, as a user gets it: built from a copy of the source, used where the source is not, with no network."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from skydraft import __version__

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOR_DEVELOPERS = {"all", "dev", "conformance", "tasks"}  # tasks: a dozen packages, for measuring alone
LIMIT_S = 120
# Runs at the start of each Python of the fresh environment.
NO_NETWORK = """
import socket
def connect(*_):
    raise OSError(101, "this test has no network")
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


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {path for path in (ROOT / "skydraft").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert packed == {str(path.relative_to(ROOT)) for path in files} | {"skydraft_command.py"}
    assert {Path(name).suffix for name in packed} >= {".html", ".css", ".js", ".j2", ".json", ".safetensors", ".proto"}


def test_the_wheel_is_of_this_version_for_any_machine_and_all_names_every_extra_for_users(wheel: Path) -> None:
    assert wheel.name == f"skydraft-{__version__}-py3-none-any.whl"
    assert f"\n## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    extras = PROJECT["project"]["optional-dependencies"]
    named = re.fullmatch(r"skydraft\[([a-z,]+)\]", *extras["all"])
    assert named and set(named[1].split(",")) == set(extras) - FOR_DEVELOPERS


def test_it_runs_where_the_source_is_not(fresh: Path, tmp_path: Path) -> None:
    place = run(fresh, tmp_path, "python", "-c", "import skydraft; print(skydraft.__file__)")
    assert Path(place.strip()).is_relative_to(fresh.parent)
    assert run(fresh, tmp_path, "skydraft", "--version") == f"skydraft, version {__version__}\n"
    generate = "generate 你好 --edge-model toy:drift=0.2 --cloud-model toy --mode quality --json -n 9"
    told = json.loads(run(fresh, tmp_path, "skydraft", *generate.split()))
    assert told["text"] and told["stats"]["num_tokens"] == 9
    assert run(fresh, tmp_path, "skydraft", "models", "path", "tiny-omni-edge").startswith(str(fresh.parent))
