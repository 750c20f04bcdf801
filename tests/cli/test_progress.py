import sys

import pytest

from skydraft.cli import progress

from .conftest import Stream


def test_a_pipe_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100, 200))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    with progress.downloads() as show:
        for done in range(50):
            show(done * 20_000_000, 1_000_000_000, "downloading tiny")
        show(95, 100, "joining tiny")
    out, err = capsys.readouterr()
    lines = [*(f"downloading tiny: {done} of 1000 MB" for done in (0, 400, 800)), "joining tiny: 0 of 0 MB"]
    assert out == "" and err.splitlines() == lines
    with progress.counted(9, "prompts", 4) as done_one:
        done_one()
    assert capsys.readouterr() == ("", "")  # it did not take long


def test_a_terminal_gets_a_bar_for_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Stream(True))
    with progress.downloads() as show:
        assert stream.getvalue() == ""
        show(1_000_000, 2_000_000, "downloading tiny")
        show(2_000_000, 2_000_000, "downloading tiny")
        show(1_000_000, 4_000_000, "joining tiny")
    with progress.showing() as bars:
        bars.show("loading", 0, 0)
        bars.show("training", 1, 3)
    for said in ("downloading tiny", "joining tiny", "2.0/2.0 MB", "1.0/4.0 MB", "0/?", "1/3"):
        assert said in stream.getvalue()
