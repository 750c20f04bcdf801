"""The walks in docs/architecture.md are what a tracer finds: the modules that one token, and one Verify, enter."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skydraft
from skydraft.cli.main import run
from tests.serving import serving

DOCUMENT = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
_VALUES = {"types", "protocol.values"}  # what travels


def walk(title: str) -> set[str]:
    """The modules of a numbered walk, which states how many they are."""
    text = re.search(rf"\*\*{title}[^*]*: (\d+) modules[^*]*\*\*\n\n(.*?)\n\n", DOCUMENT, re.S)
    assert text
    modules = re.findall(r"^\d+\. `([\w.]+)`", text[2], re.M)
    assert len(modules) == len(set(modules)) == int(text[1])
    return set(modules)


class Tracer:
    """Modules of the package that were entered since `clear`, apart for the main thread and all others."""

    def __init__(self) -> None:
        self.main: set[str] = set()
        self.others: set[str] = set()
        self.verified: list[tuple[set[str], set[str]]] = []

    def __call__(self, frame: Any, event: str, arg: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("skydraft."):
            where = self.main if threading.current_thread() is threading.main_thread() else self.others
            where.add(name.removeprefix("skydraft."))

    def clear(self) -> None:
        self.main.clear()
        self.others.clear()


@pytest.fixture
def tracer() -> Iterator[Tracer]:
    found = Tracer()
    threading.setprofile(found)
    yield found
    sys.setprofile(None)
    threading.setprofile(None)


def test_the_walks_are_those_of_the_architecture(
    tracer: Tracer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path))
    from skydraft.cli import generate as command

    def show(console: Any, tokens: Any) -> None:
        shown(console, tokens)
        if all(token.origin in ("accepted", "recovered", "bonus") for token in tokens) and tokens[0].round > 2:
            tracer.verified.append((set(tracer.main), set(tracer.others)))
        tracer.clear()

    shown = command.show_tokens
    monkeypatch.setattr(command, "show_tokens", show)
    with serving(skydraft.load("toy")) as server:
        sys.setprofile(tracer)
        given = ["--mode", "quality", "--cloud", server.address, "--edge-model", "toy:drift=0.2", "-n", "60", "-q"]
        assert run(["generate", "你好世界", *given]) == 0
        sys.setprofile(None)
    capsys.readouterr()
    assert tracer.verified, "no round was verified"
    smallest = min(tracer.verified, key=lambda sides: len(sides[0] | sides[1]))
    # The command's own loop runs in a frame that is entered once.
    assert smallest[0] - _VALUES == walk("One token") - {"cli.generate"}
    assert smallest[1] - _VALUES == walk("One Verify")


def test_the_modules_on_the_way_of_a_record_exist() -> None:
    (text,) = re.findall(r"\*\*One record to the page: 12 modules\.\*\*(.*)", DOCUMENT, re.S)
    names = re.findall(r"`([a-z_.0-9]+)`", text)
    assert len(names) == len(set(names)) == 12
    root = Path(skydraft.__file__).parent
    for name in names:
        assert (root / "evaluation/report" / name).exists() or (root / f"{name.replace('.', '/')}.py").exists(), name
