"""`skydraft models`, `skydraft doctor`, and the top level."""

from __future__ import annotations

from pathlib import Path

import pytest

from skydraft.cli.main import run


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path))
    return tmp_path


def test_models_are_listed_with_the_command_that_gets_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "list"]) == 0
    out = capsys.readouterr().out
    assert "qwen2.5-coder-1.5b" in out
    assert "1117 MB" in out
    assert "skydraft models fetch" in " ".join(out.split())


def test_fetching_something_unknown_names_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "fetch", "gpt-9"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "qwen2.5-coder-0.5b" in err


def test_doctor_says_what_is_missing_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--no-measure"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "To do: get the model: skydraft models fetch qwen2.5-coder-0.5b" in out


def test_doctor_measures_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    run(["doctor", "--edge-model", "toy:drift=0.3", "--cloud-model", "toy"])
    out = capsys.readouterr().out
    assert "invariant_rows" in out
    assert "vocabulary   the same" in out
    assert "fastest k" in out


def test_no_command_shows_the_help_and_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    assert "generate" in capsys.readouterr().out
    assert run([]) == 2
    assert "generate" in capsys.readouterr().err
