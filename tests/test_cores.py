"""How many cores a process may use: a container's share of time counts as well as its cores."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from skydraft.config import _quota, num_cores


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, math.inf),
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "nonsense\n"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
    ],
)
def test_the_share_of_a_control_group(files: dict[str, str], expected: float, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert _quota(tmp_path) == expected


def test_there_is_at_least_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    for quota, expected in ((0.2, 1), (1.0, 1)):
        monkeypatch.setattr("skydraft.config._quota", lambda root, quota=quota: quota)
        assert num_cores() == expected
    monkeypatch.setattr("skydraft.config._quota", lambda root: math.inf)
    assert num_cores() >= 1
