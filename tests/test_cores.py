"""How many cores a process may use: a container's share of time counts as well as its cores."""

from pathlib import Path

import pytest

from skydraft.config import num_cores


@pytest.mark.parametrize(("files", "expected"), [
    ({}, 8),
    ({"cpu.max": "150000 100000\n"}, 2),
    ({"cpu.max": "20000 100000\n"}, 1),
    ({"cpu.max": "max 100000\n"}, 8),
])  # fmt: skip
def test_a_control_group(files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cores of a process are the share of its control group."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(8), raising=False)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert num_cores(tmp_path) == expected
