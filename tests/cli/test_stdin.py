"""`skydraft generate` beside a pipe: what comes through it is read, and what never comes is not waited for."""

import io
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ..starting import command
from .conftest import Invoke

GENERATE = ["generate", "--edge-model", "toy", "-m", "edge", "-n", "12"]
Said = Callable[..., str]


@pytest.fixture
def said(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> Said:
    """What a command prints beside a pipe with these bytes, or beside this open file."""

    def call(*args: str, piped: bytes | str | int | None = None, quiet: bool = True) -> str:
        read = piped if isinstance(piped, int) else os.open(os.devnull, os.O_RDONLY)
        if isinstance(piped, (bytes, str)):
            read, write = os.pipe()
            os.write(write, piped if isinstance(piped, bytes) else piped.encode())
            os.close(write)
        with open(read, encoding="utf-8") as stdin:
            assert isinstance(stdin, io.TextIOWrapper)
            monkeypatch.setattr("sys.stdin", stdin)
            status, out, err = invoke(*GENERATE, *(["-q"] if quiet else []), "--", *args)
        assert not quiet or status == 0, err
        return out + ("" if quiet else err)

    return call


@pytest.mark.parametrize("piped", ["语速", "语速\n", "一\n二\n\n", "\ufeff语速\n"])
def test_what_is_piped_in_stands_before_the_prompt(said: Said, piped: str) -> None:
    text = piped.removeprefix("\ufeff")
    assert said("情绪", piped=piped) == said(f"{text.removesuffix(chr(10))}\n情绪") != said("情绪")
    assert said(piped=piped) == said("-", piped=piped) == said(text)  # the prompt, where there is no other


def test_a_file_is_read_like_a_pipe_and_one_without_text_changes_nothing(said: Said, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("语速\n")
    assert said("情绪", piped=os.open(tmp_path / "a.txt", os.O_RDONLY)) == said("情绪", piped="语速\n")
    assert said("情绪", piped="") == said("情绪", piped=" \n\n") == said("-", piped="情绪") == said("情绪")


@pytest.mark.parametrize("odd", ["<&-", "0>/dev/null"])
def test_closed_and_odd_stdin_change_nothing(said: Said, odd: str) -> None:
    shell = ["bash", "-c", f'exec "$@" {odd}', "-", command(), *GENERATE, "-q", "情绪"]
    assert subprocess.run(shell, capture_output=True, text=True, timeout=60, check=True).stdout == said("情绪")


def test_a_slow_writer_is_heard_to_the_end_a_silent_one_is_not(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skydraft.cli.generate._SILENT_S", 0.3)
    read, write = os.pipe()
    told = said("情绪", piped=read, quiet=False)
    os.close(write)
    assert told.startswith(said("情绪")) and "nothing came from stdin for 0.3 s, so it is left out" in told
    read, write = os.pipe()
    os.write(write, "语".encode())
    writer = threading.Timer(0.6, lambda: (os.write(write, "速".encode()), os.close(write)))
    writer.start()
    assert said("情绪", piped=read) == said("情绪", piped="语速")
    writer.join()


def test_bytes_that_are_no_text_are_one_line(said: Said) -> None:
    told = said("情绪", piped=b"\xff\xfe", quiet=False)
    assert told.count("\n") == 1 and "not valid UTF-8" in told
