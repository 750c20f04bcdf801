"""`skydraft generate` beside a pipe: what comes through it is read, and what never comes is not waited for."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest

from ..starting import command

TOYS = ["--edge-model", "toy", "-m", "edge", "-n", "12", "-q"]
GENERATE = ["generate", *TOYS]


def said(*args: str, before: Seq[str] = (), expect: int = 0, **streams: object) -> str:
    """What a command prints, whose stdin is one of `streams`, as `subprocess.run` takes them."""
    done = subprocess.run(
        [*before, command(), *GENERATE, *args], capture_output=True, text=True, timeout=60, check=False, **streams
    )  # type: ignore[call-overload]
    assert done.returncode == expect and "Traceback" not in done.stderr, done.stderr
    return str(done.stdout if expect == 0 else done.stderr)


@pytest.fixture(scope="module")
def alone() -> str:
    """The answer to a question with nothing beside it."""
    return said("--", "情绪", stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("piped", ["语速", "语速\n", "一\n二\n\n"])
def test_what_is_piped_in_stands_before_the_prompt(alone: str, piped: str) -> None:
    whole = said("--", f"{piped.removesuffix(chr(10))}\n情绪", stdin=subprocess.DEVNULL)
    assert said("情绪", input=piped) == whole != alone


def test_it_is_the_prompt_where_there_is_no_other() -> None:
    assert said(input="语速\n") == said("-", input="语速\n") == said("语速\n", stdin=subprocess.DEVNULL)


def test_a_byte_order_mark_is_dropped(alone: str) -> None:
    assert said("-", input="\ufeff语速\n") == said("语速\n", stdin=subprocess.DEVNULL)
    assert said("情绪", input="\ufeff语速\n") == said("情绪", input="语速\n") != alone


def test_a_file_is_read_like_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("语速\n")
    with path.open() as file:
        assert said("情绪", stdin=file) == said("情绪", input="语速\n")


def test_a_writer_that_takes_its_time_is_heard_to_the_end() -> None:
    slow = f"{{ sleep 0.7; printf 语; sleep 3; printf 速; }} | {' '.join([command(), *GENERATE])} 情绪"
    done = subprocess.run(["bash", "-c", slow], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == said("情绪", input="语速")


@pytest.mark.parametrize("piped", ["", "\n", " \n\n"])
def test_a_pipe_without_text_changes_nothing(alone: str, piped: str) -> None:
    assert said("情绪", input=piped) == alone


def test_closed_and_odd_stdin_change_nothing(alone: str) -> None:
    assert said("情绪", before=["bash", "-c", 'exec "$@" <&-', "-"]) == alone
    assert said("情绪", before=["bash", "-c", 'exec "$@" </dev/zero', "-"]) == alone
    assert said("情绪", before=["bash", "-c", 'exec "$@" 0>/dev/null', "-"]) == alone


def test_a_pipe_that_stays_silent_is_not_waited_for(alone: str) -> None:
    read, write = os.pipe()
    try:
        began = time.monotonic()
        assert said("情绪", stdin=read) == alone
        assert time.monotonic() - began > 2
        loud = [command(), *GENERATE[:-1], "情绪"]
        done = subprocess.run(loud, stdin=read, capture_output=True, text=True, timeout=60, check=True)
    finally:
        os.close(read)
        os.close(write)
    assert done.stdout == alone and "nothing came from stdin for 2 s, so it is left out" in done.stderr


def test_stdin_that_is_spoken_for_is_read_once(alone: str) -> None:
    talk = json.dumps([{"role": "user", "content": "语速"}, {"role": "assistant", "content": "快"}])
    both = said("--messages", "-", "情绪", input=talk)
    assert both not in (alone, said("情绪", input=talk))
    assert said("-", input="情绪") == alone


def test_bytes_that_are_no_text_are_one_line() -> None:
    done = subprocess.run(
        [command(), *GENERATE, "情绪"], input=b"\xff\xfe", capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and b"not valid UTF-8" in done.stderr
