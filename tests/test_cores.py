"""How many cores a process may use: a container's share of time counts as well as its cores."""

from pathlib import Path

import pytest

from skydraft.config import num_cores


@pytest.mark.parametrize(("share", "expected"), [("", 8), ("150000", 2), ("20000", 1), ("max", 8)])
def test_a_control_group(share: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cores of a process are the share of its control group."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(8), raising=False)
    if share:
        (tmp_path / "cpu.max").write_text(f"{share} 100000\n")
    assert num_cores(tmp_path) == expected
