"""The walks in docs/architecture.md are what a tracer finds: the modules that one token, and one Verify, enter."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import skydraft

ROOT = Path(__file__).parent.parent
DOCUMENT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def walk(title: str) -> set[str]:
    """The modules of a walk, which states how many they are."""
    text = re.search(rf"\*\*{title}[^*]*: (\d+) modules[^*]*\*\*(.*?)\n\n", DOCUMENT + "\n\n", re.S)
    assert text
    modules = re.findall(r"`([\w.]+)`", text[2])
    assert len(modules) == len(set(modules)) == int(text[1])
    return set(modules)


def entered(*options: str) -> list[set[str]]:
    """The modules that a verified round enters at the edge and at the server."""
    done = subprocess.run([sys.executable, "-m", "tests.walking", *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [set(side) for side in json.loads(done.stdout.splitlines()[-1])]


def test_the_walks_are_those_of_the_architecture() -> None:
    edge, cloud = entered()
    assert edge == walk("One token") and len(edge) <= 17
    assert cloud == walk("One Verify") and len(cloud) <= 12


def test_a_sampled_token_of_a_style_enters_few_modules_more() -> None:
    edge, _ = entered("--temperature", "0.8", "--style", "zh-short")
    assert len(edge) <= 23


@pytest.mark.parametrize(("title", "most"), [("One record", 12), ("One lesson", 10), ("One chat completion", 22)])
def test_the_modules_of_the_other_walks_exist(title: str, most: int) -> None:
    names = walk(title)
    root = Path(skydraft.__file__).parent
    for name in names:
        assert (root / "evaluation/report" / name).exists() or (root / f"{name.replace('.', '/')}.py").exists(), name
    assert len(names) <= most
