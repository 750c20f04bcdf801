"""The README's Python runs as printed, with toys in the place of the pair."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_python_example_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path))
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    code = code.replace('"qwen2.5-coder-0.5b"', '"toy:drift=0.4"').replace('"qwen2.5-coder-1.5b"', '"toy"')
    assert code.count("toy") == 2
    exec(compile(code, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "accepted" in out
    assert "calls/token" in out


def test_every_option_and_mode_that_the_readme_names_exists() -> None:
    from click import Context

    from skydraft.cli.generate import generate
    from skydraft.config import MODES

    help_text = generate.get_help(Context(generate))
    for option in set(re.findall(r"`(--[a-z-]+)", README)):
        assert option in help_text or option in ("--help",), option
    for mode in set(re.findall(r"--mode ([a-z]+)", README)):
        assert mode in MODES, mode
