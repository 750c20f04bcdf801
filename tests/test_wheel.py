"""The wheel, as a user gets it: built from a copy of the source, used where the source is not."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from skydraft import __version__
from skydraft.engines.checkpoints.engine import _FITTING

from .starting import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOR_DEVELOPERS = {"all", "dev", "conformance", "tasks", "quantized"}  # the last: a dozen packages; kernels for GPUs


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
    subprocess.run([*build, "-w", out, source], check=True, capture_output=True)
    (made,) = out.iterdir()
    return made


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {path for path in (ROOT / "skydraft").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert packed == {str(path.relative_to(ROOT)) for path in files} | {"skydraft_command.py"}
    assert {Path(name).suffix for name in packed} >= {".html", ".js", ".LICENSE", ".j2", ".safetensors", ".proto"}


def test_the_wheel_is_of_this_version_for_any_machine_and_all_names_every_extra_for_users(wheel: Path) -> None:
    assert wheel.name == f"skydraft-{__version__}-py3-none-any.whl"
    assert PROJECT["project"]["scripts"] == {"skydraft": "skydraft_command:main"}  # which can be interrupted
    assert f"\n## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    extras = PROJECT["project"]["optional-dependencies"]
    named = re.fullmatch(r"skydraft\[([a-z,]+)\]", *extras["all"])
    parts = (extras[name] for name in ("gateway", "grammar", "prebuilt", "serve"))
    assert set(extras["service"]) == set().union(*parts, ["gguf>=0.10"])  # which reads files of adapters
    for name in ("omni", "learn", "transformers"):  # a version outside is named by messages
        (range_,) = (each for each in map(Requirement, extras[name]) if each.name == "transformers")
        assert range_.specifier == _FITTING
    assert named and set(named[1].split(",")) == set(extras) - FOR_DEVELOPERS


def test_it_runs_where_the_source_is_not(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    places = {"PYTHONPATH": str(tmp_path / "site"), "SKYDRAFT_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}

    def run(command: str) -> str:
        code = "import skydraft_command; skydraft_command.main()"
        words = [sys.executable, "-c", code, *command.split()]
        done = subprocess.run(words, cwd=tmp_path, env=os.environ | places, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("--version") == f"skydraft, version {__version__}\n"
    told = json.loads(run("generate 你好 --edge-model toy:drift=0.2 --cloud-model toy --mode quality --json -n 9"))
    assert told["text"] and told["stats"]["num_tokens"] == 9
    assert run("models path tiny-omni-edge").startswith(str(tmp_path / "site"))
