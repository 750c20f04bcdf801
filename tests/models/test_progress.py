from __future__ import annotations

import io

import pytest

from skydraft.models import progress_on


def test_a_pipe_gets_a_line_about_every_ten_percent_of_each_step_without_escapes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress_on() as progress:
        for done in range(1001):
            progress(done * 1_000_000, 1_000_000_000, "downloading tiny")
        progress(95, 100, "joining tiny")
        progress(96, 100, "joining tiny")
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and "\x1b" not in err and lines[0] == "downloading tiny: 0% (0 of 1000 MB)"
    assert lines[10:] == ["downloading tiny: 100% (1000 of 1000 MB)", "joining tiny: 95% (0 of 0 MB)"]


def test_a_terminal_gets_a_bar_for_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    with progress_on(stream) as progress:
        assert stream.getvalue() == ""
        progress(1_000_000, 2_000_000, "downloading tiny")
        progress(2_000_000, 2_000_000, "downloading tiny")
        progress(1_000_000, 4_000_000, "joining tiny")
    for said in ("downloading tiny", "joining tiny", "2.0/2.0 MB", "1.0/4.0 MB"):
        assert said in stream.getvalue()
