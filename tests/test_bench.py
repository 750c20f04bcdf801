"""Every measurement can be started: it finds what it imports and says what it takes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
NEEDS = {
    "baselines": "llama_cpp",
    "bare_loop": "llama_cpp",
    "screenshots": "playwright",
    "speed": "llama_cpp",
    "speech_identity": "transformers",
}
PARTS = {
    "__init__",
    "bare_loop",
    "frames",
    "server",
    "structured_checks",
    "structured_speed",
    "structured_summary",
    "workload",
}  # of others


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCH.glob("*.py")))
def test_a_measurement_imports_and_explains_itself(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    module = importlib.import_module(f"bench.{name}")
    assert module.__doc__
    if name in PARTS:
        return
    assert f"python -m bench.{name}" in module.__doc__
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    assert module.__doc__.splitlines()[0] in " ".join(capsys.readouterr().out.split())
