"""What tests of commands share: the command line in this process, and what it printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from skydraft.cli.main import run

Invoke = Callable[..., tuple[int, str, str]]


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run a command; returns (exit status, stdout, stderr)."""
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path / "home"))

    def call(*args: str) -> tuple[int, str, str]:
        status = run(args)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call
