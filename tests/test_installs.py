"""Each extra as a user gets it: a wheel of the sdist, in an environment of its own, newest that the ranges allow.

`make test-installs` runs these; they need a package index. The one with torch takes gigabytes and long, so CI leaves it
out; its torch is that of the lock, as a newer one may bring CUDA.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .test_wheel import ROOT

pytestmark = [pytest.mark.installs, pytest.mark.timeout(1800)]
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
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


@pytest.mark.parametrize("extra", [pytest.param(each, marks=LATER["learn" in each]) for each in USES])
def test_an_extra_is_enough_for_what_it_is_for(wheel: Path, extra: str, tmp_path: Path) -> None:
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    torch = re.search(r"^torch==.*$", (ROOT / "requirements.lock").read_text(), re.M)
    (tmp_path / "pins").write_text(torch[0] if torch else "")
    tools = ["pytest", "pytest-timeout", "hypothesis", "trustme"] if CONTRACT in USES[extra] else []
    what = f"{wheel}[{extra}]" if extra else str(wheel)
    subprocess.run([python, "-m", "pip", "install", "-q", "-c", tmp_path / "pins", what, *tools], check=True)
    subprocess.run([python, "-m", "pip", "check"], check=True)
    places = os.environ | {"SKYDRAFT_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    places.pop("PYTHONPATH", None)
    for use in USES[extra]:
        words = [word.replace("\t", " ") for word in use.split(" ")]
        where = ROOT if use == CONTRACT else tmp_path
        done = subprocess.run([python, *words], cwd=where, env=places, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
