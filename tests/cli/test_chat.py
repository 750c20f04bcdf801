"""`skydraft chat`: what is said, what is remembered, and what Ctrl-C ends."""

import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.engines.toy import open_toy

from ..evaluation.pairs import TOYS
from .conftest import Invoke, read_screen, terminal

Talk = Callable[..., tuple[list[str], str]]


@pytest.fixture
def talk(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """(Lines of stdout, stderr) of a conversation that is piped in."""

    def call(*lines: str, options: tuple[str, ...] = ()) -> tuple[list[str], str]:
        piped = io.BytesIO("".join(f"{line}\n" for line in lines).encode(errors="surrogateescape"))
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(piped, encoding="utf-8"))
        status, out, err = invoke("chat", *TOYS, "-n", "12", *options)
        assert status == 0, err
        return out.splitlines(), err

    return call


def answer(messages: list[dict[str, str]]) -> str:
    """What fresh engines answer."""
    params, (edge, cloud) = DecodingParams(max_new_tokens=12), (open_toy("toy:drift=0.2"), open_toy("toy"))
    plan = make_plan("lossless")
    return skydraft.generate(messages=messages, edge=edge, cloud=cloud, plan=plan, params=params).run().text


def test_each_answer_follows_all_that_was_said(tmp_path: Path, talk: Talk) -> None:
    saved = tmp_path / "talk.json"
    talk("语速", "/mode lossless", "一二", f"/save {saved}", options=("-s", "慢"))
    said = json.loads(saved.read_text())
    assert [turn["role"] for turn in said] == ["system", "user", "assistant", "user", "assistant"]
    assert said[0]["content"] == "慢" and said[3]["content"] == "一二"
    assert said[2]["content"] == answer(said[:2]) and said[4]["content"] == answer(said[:4])


def test_nonsense_gets_a_line_and_loses_nothing(tmp_path: Path, talk: Talk) -> None:
    saved = tmp_path / "talk.json"
    _, err = talk(
        "语速", "/nope", "/mode best", "/save", "/mode", "/mode auto", "速", "/mode quality", "",
        "   ", "语" * 5000, "\udcff", f"/save {saved}", "/clear", "/help",
        "/quit", "never asked",
    )  # fmt: skip
    says = ("no command /nope", "no mode 'best'", "/save needs a", "/mode needs a", "/clear", "no calibration")
    assert all(each in err for each in says), err
    asked = [turn["content"] for turn in json.loads(saved.read_text())][::2]
    assert asked == ["语速", "\ufffd"]


def test_later_turns_are_partly_cached(talk: Talk) -> None:
    _, err = talk("语" * 700, "快")
    first, second = (line for line in err.splitlines() if "tokens/s" in line)
    assert "cached" not in first and "512 of" in second


def test_ctrl_c_ends_the_answer_and_not_the_conversation(tmp_path: Path) -> None:
    options = ["-n", "90000", "--min-new-tokens", "90000", "--context", "100000", "-m", "edge", "--color", "never"]
    with terminal(tmp_path, "chat", *TOYS, *options, TERM="dumb") as (child, main):
        read_screen(main, "> ")
        os.write(main, "语速\n".encode())
        read_screen(main, r"(\S\s*){20}")  # some of the answer, after the question
        os.write(main, b"\x03")
        read_screen(main, "ended by interrupted.*> ")
        os.write(main, b"/quit\n")
        assert child.wait(30) == 0
