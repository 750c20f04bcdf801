"""What tests of commands share: the command line in this process, and what it printed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from skydraft.cli.main import run

TOYS = ["--edge-model", "toy:drift=0.4", "--cloud-model", "toy"]
Invoke = Callable[..., tuple[int, str, str]]
Refused = Callable[..., None]


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run a command; returns (exit status, stdout, stderr)."""
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path / "home"))

    def call(*args: str) -> tuple[int, str, str]:
        status = run(args)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def refused(invoke: Invoke) -> Refused:
    """Run a command that must print one line on stderr, which says this, and nothing on stdout."""

    def call(*args: str, says: str, status: int = 2) -> None:
        found, out, err = invoke(*args)
        assert (found, out) == (status, ""), err
        assert says in err and err.startswith("skydraft: ") and err.count("\n") == 1 and err.strip().isprintable()

    return call
