"""What a terminal shows: colours where they are wanted, whole lines, nothing that moves the cursor; and how far a long
command has come, there and in a pipe.
"""

import json
import logging
import re
import sys
from pathlib import Path

import pytest

from skydraft.characters import visible
from skydraft.cli import progress
from skydraft.cli.terminal import Terminal, console_for, is_colored, show_tokens
from skydraft.cloud.logs import JsonLines
from skydraft.engines.toy import open_toy
from skydraft.types import Token

from ..serving import serving
from .conftest import TOYS, Invoke, Stream, on_screen

HOSTILE = "evil\x1b]0;owned\x07\nskydraft: all is well\x9b2J"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.mark.parametrize(("env", "color", "expected"), [
    ({}, "auto", True), ({}, "never", False), ({"NO_COLOR": ""}, "auto", True), ({"NO_COLOR": "1"}, "auto", False),
    ({"NO_COLOR": "1"}, "always", True), ({"TERM": "dumb"}, "auto", False), ({"TERM": "dumb"}, "always", True),
])  # fmt: skip
def test_colours_are_as_told(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], color: str, expected: bool) -> None:
    """What is said of colours goes before what is guessed."""
    for name, value in ({"NO_COLOR": None, "FORCE_COLOR": None, "TERM": "xterm-256color"} | env).items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", out := Stream())
    monkeypatch.setattr(sys, "stderr", Stream())
    show_tokens(console_for(color), [Token(1, "accepted", "快", 0)])
    assert is_colored(console_for(color, stderr=True)) is expected
    assert out.getvalue() == ("\x1b[32m快\x1b[0m" if expected else "快")


def test_a_model_cannot_move_the_cursor(tmp_path: Path, invoke: Invoke) -> None:
    args = ["generate", "你好", *TOYS, "-m", "edge", "-n", "400", "--temperature", "1.5", "-q"]
    piped = invoke(*args)[1]
    assert "\x1b" in piped  # this toy writes all sorts of characters
    status, screen = on_screen(tmp_path, *args, "--color", "never")
    assert status == 0 and not _CONTROL.search(screen) and screen == visible(piped)


@pytest.mark.parametrize(("is_terminal", "is_open", "says"), [(True, True, "\n"), (True, False, ""), (False, True, "")])
def test_a_notice_ends_a_state(monkeypatch: pytest.MonkeyPatch, is_terminal: bool, is_open: bool, says: str) -> None:
    """A notice begins on a new line and takes the place of a state."""
    out, err, terminal = Stream(is_terminal), Stream(is_terminal), Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    terminal.write("海边" if is_open else "海边\n")
    terminal.say("The cloud is gone.\nSo it is.")
    with terminal.state("Loading…"):
        terminal.say("It is back.")
    state = "Loading…\r\x1b[K" if is_terminal else ""
    assert err.getvalue() == f"{says}skydraft: The cloud is gone. So it is.\n{state}skydraft: It is back.\n"
    assert out.getvalue().strip() == "海边"


def test_an_error_after_half_an_answer_has_a_line_of_its_own(tmp_path: Path) -> None:
    code = (
        "import skydraft.cli.main as main, skydraft.errors as errors\n"
        "from skydraft.engines.toy import ToyEngine\n"
        "forward, calls = ToyEngine.forward, iter([True] * 20)\n"
        "def fail(*args, **given):\n"
        "    if next(calls, None): return forward(*args, **given)\n"
        "    raise errors.EngineError('The engine broke\\x1b[2J.')\n"
        "ToyEngine.forward = fail\nmain.main()"
    )
    args = ["generate", "你好", *TOYS, "--color", "never"]
    status, screen = on_screen(tmp_path, *args, command=[sys.executable, "-c", code])
    assert status == 1 and re.match(r"....+\nskydraft: The engine broke\\x1b\[2J\.\n$", screen, re.DOTALL), screen


def test_names_and_reasons_of_a_server_are_one_line(invoke: Invoke) -> None:
    engine = open_toy("toy")
    engine.name = HOSTILE
    with serving(engine) as server:
        status, out, _ = invoke("doctor", "--cloud", server.address, "--edge-model", "toy:drift=0.2")
    assert status == 0 and "evil\\x1b]0;owned\\x07 skydraft: all is well\\x9b2J" in out and not _CONTROL.search(out)


def test_a_log_line_holds_no_control_character_and_loses_none() -> None:
    record = logging.LogRecord("skydraft.cloud", logging.INFO, "", 0, HOSTILE, (), None)
    record.label = HOSTILE
    line = JsonLines().format(record)
    assert not _CONTROL.search(line) and "\n" not in line
    assert json.loads(line)["event"] == json.loads(line)["label"] == HOSTILE


GENERATE = ["generate", "你好", *TOYS, "-n", "8", "--color", "never"]


@pytest.mark.parametrize(("args", "states"), [
    (GENERATE, ["Loading toy:drift=0.4…", "Loading toy…"]),
    (["doctor", "--cloud", "127.0.0.1:9", "--cloud-timeout", "0.3", *TOYS[:2]], ["Asking 127.0.0.1:9…"]),
])  # fmt: skip
def test_what_takes_long_is_shown_for_as_long_as_it_does(tmp_path: Path, args: list[str], states: list[str]) -> None:
    screen = on_screen(tmp_path, *args)[1]
    assert all(f"{state}\r\x1b[K" in screen for state in states)


@pytest.mark.parametrize(("more", "how"), [
    ((), {"TERM": "dumb"}), (("-q",), {}), (("--json",), {"piped": "out"}), ((), {"piped": "err"}),
])  # fmt: skip
def test_nothing_is_shown_to_whoever_wants_quiet(tmp_path: Path, more: tuple[str, ...], how: dict[str, str]) -> None:
    status, screen = on_screen(tmp_path, *GENERATE, *more, **how)
    assert status == 0 and "Loading" not in screen and (how != {"piped": "out"} or not screen)


def test_a_state_fits_on_its_line_and_is_gone_after_an_error(tmp_path: Path) -> None:
    status, screen = on_screen(tmp_path, "generate", "你好", "--edge-model", "没有的模型" * 10, COLUMNS="60")
    state, _, rest = screen.partition("\r\x1b[K")
    assert status == 2 and state.startswith("Loading 没有的模型") and len(state.encode("gbk")) < 60
    assert rest.startswith("skydraft: ")


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
