"""The wheel, as a user gets it, built from a copy of the source and used where the source is not; and each extra, of a
wheel of the sdist, in an environment of its own, newest that the ranges allow.

`make test-installs` runs those of extras; they need a package index. The one with torch takes gigabytes and long, so CI
leaves it out; its torch is that of the lock, as a newer one may bring CUDA.
"""

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


TOYS = "-m skydraft.cli.main generate 你好 --edge-model toy:drift=0.2 --cloud-model toy -n 9 --mode quality"
_PARTS = ("contract", "transformers_text", "omni")
CONTRACT = " ".join(("-m pytest -q", *(f"tests/engines/test_{part}.py" for part in _PARTS)))
# What each extra is for, in that environment alone: arguments of python, from the folder of the source or another.
USES: dict[str, list[str]] = {
    "": [TOYS],
    "service": [f"{TOYS} --regex [a-z]+", "-m skydraft.cli.main gateway --help", "-c import\txllamacpp"],
    "report": ["-c from\tskydraft.lab.evaluation.report.plots\timport\tload_pyplot;load_pyplot()"],
    "omni,learn": [
        "-c from\tskydraft.engines.checkpoints.trainable\timport\tcheck_trainable;check_trainable()",
        CONTRACT,
    ],
}


@pytest.fixture(scope="module")
def wheel_of_sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a checkout without what lies beside it, by way of the sdist."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    asks = ["-m", "pip", "--retries", "0", "download", "-q", "--no-deps", "packaging", "-d"]
    if subprocess.run([sys.executable, *asks, out / "found"], capture_output=True).returncode:
        pytest.skip("no package index answers")
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "x", "-C", source], input=archive, check=True)
    made = f"from setuptools.build_meta import build_sdist; print(build_sdist(r'{out}'))"
    done = subprocess.run([sys.executable, "-c", made], cwd=source, check=True, capture_output=True, text=True)
    sdist = out / done.stdout.split()[-1]
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", out, sdist], check=True)
    return next(out.glob("*.whl"))


LATER = {True: [pytest.mark.long], False: []}


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


@pytest.mark.installs
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("extra", [pytest.param(each, marks=LATER["learn" in each]) for each in USES])
def test_an_extra_is_enough_for_what_it_is_for(wheel_of_sdist: Path, extra: str, tmp_path: Path) -> None:
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    torch = re.search(r"^torch==.*$", (ROOT / "requirements.lock").read_text(), re.M)
    (tmp_path / "pins").write_text(torch[0] if torch else "")
    tools = ["pytest", "pytest-timeout", "hypothesis", "trustme"] if CONTRACT in USES[extra] else []
    what = f"{wheel_of_sdist}[{extra}]" if extra else str(wheel_of_sdist)
    subprocess.run([python, "-m", "pip", "install", "-q", "-c", tmp_path / "pins", what, *tools], check=True)
    subprocess.run([python, "-m", "pip", "check"], check=True)
    places = os.environ | {"SKYDRAFT_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    places.pop("PYTHONPATH", None)
    for use in USES[extra]:
        words = [word.replace("\t", " ") for word in use.split(" ")]
        where = ROOT if use == CONTRACT else tmp_path
        done = subprocess.run([python, *words], cwd=where, env=places, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
