"""Every measurement can be started: it finds what it imports, and says how it is called."""

import importlib
from pathlib import Path

import pytest

from bench.__main__ import commands, main

NEEDS = {"bare_loop": "llama_cpp", "screenshots": "playwright"}
BENCH = Path(__file__).parent.parent / "bench"


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCH.glob("[a-z]*.py")))
def test_a_measurement_imports_and_explains_itself(name: str) -> None:
    pytest.importorskip(NEEDS.get(name, "skydraft"))
    module = importlib.import_module(f"bench.{name}")
    assert module.__doc__ and hasattr(module, "main") == (name in commands())
    assert name not in commands() or f"python -m bench {name}" in module.__doc__


def test_bench_lists_and_runs_its_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*commands()]
    with pytest.raises(SystemExit, match="There is no nothing"):
        main(["nothing"])
    monkeypatch.setattr("sys.argv", [])
    with pytest.raises(SystemExit) as ended:
        main(["reference", "--help"])
    assert not ended.value.code and capsys.readouterr().out.startswith("usage: python -m bench reference")
