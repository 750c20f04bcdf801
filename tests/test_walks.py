"""The walks in docs/architecture.md are what a tracer finds: the modules that one token, and one Verify, enter."""

import json
import re
import subprocess
import sys

from .starting import ROOT

DOCUMENT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def walk(title: str) -> set[str]:
    """The modules of a walk, which states how many they are."""
    text = re.search(rf"\*\*{title}[^*]*: (\d+) modules[^*]*\*\*(.*?)\n\n", DOCUMENT + "\n\n", re.S)
    assert text
    modules = re.findall(r"`([\w.]+)`", text[2])
    assert len(modules) == len(set(modules)) == int(text[1])
    return set(modules)


def test_the_walks_are_those_of_the_architecture() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.walking"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    edge, cloud = map(set, json.loads(done.stdout.splitlines()[-1]))
    assert edge == walk("One token") and len(edge) <= 17
    assert cloud == walk("One Verify") and len(cloud) <= 14
