from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import Progress as RichProgress

from skydraft.models import progress_on
from skydraft.models.progress import bar_progress, line_progress


def test_lines_come_about_every_ten_percent() -> None:
    stream = io.StringIO()
    progress = line_progress(stream)
    for done in range(1001):
        progress(done * 1_000_000, 1_000_000_000, "downloading tiny")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[0] == "downloading tiny: 0% (0 of 1000 MB)"
    assert lines[-1] == "downloading tiny: 100% (1000 of 1000 MB)"


def test_each_step_begins_anew_and_jumps_are_one_line() -> None:
    stream = io.StringIO()
    progress = line_progress(stream)
    progress(95, 100, "downloading tiny")
    progress(96, 100, "downloading tiny")
    progress(0, 100, "joining tiny")
    assert [line.split(" (")[0] for line in stream.getvalue().splitlines()] == [
        "downloading tiny: 95%",
        "joining tiny: 0%",
    ]


def test_a_pipe_gets_lines_without_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_on() as progress:
        progress(1, 1, "joining tiny")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "joining tiny: 100% (0 of 0 MB)\n"


def test_a_terminal_gets_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    with progress_on(stream) as progress:
        assert stream.getvalue() == ""
        progress(1_000_000, 2_000_000, "downloading tiny")
        progress(2_000_000, 2_000_000, "downloading tiny")
    assert "downloading tiny" in stream.getvalue()
    assert "2.0/2.0 MB" in stream.getvalue()


def test_one_bar_for_each_step() -> None:
    bars = RichProgress(console=Console(file=io.StringIO(), force_terminal=True))
    progress = bar_progress(bars)
    progress(1, 10, "downloading tiny")
    progress(5, 10, "downloading tiny")
    progress(2, 10, "joining tiny")
    bars.stop()
    assert [(task.description, task.completed) for task in bars.tasks] == [("downloading tiny", 5), ("joining tiny", 2)]
