"""Every measurement can be started: it finds what it imports, and says how it is called."""

import importlib
import shutil
import subprocess
from pathlib import Path

import pytest

NEEDS = dict.fromkeys(("baselines", "bare_loop", "speed"), "llama_cpp") | {
    "screenshots": "playwright", "speech_identity": "transformers",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(path.stem for path in (Path(__file__).parent.parent / "bench").glob("*.py")))
def test_a_measurement_imports_and_explains_itself(name: str) -> None:
    pytest.importorskip(NEEDS.get(name, "skydraft"))
    module = importlib.import_module(f"bench.{name}")
    assert module.__doc__ and (not hasattr(module, "main") or f"python -m bench.{name}" in module.__doc__)


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make")
def test_the_long_laws_run_with_make_test_long() -> None:
    asked = ["make", "--dry-run", "test-long"]
    said = subprocess.run(asked, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True).stdout
    assert 'pytest -m "not installs" --num' in said
