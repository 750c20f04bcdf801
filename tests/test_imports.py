"""Imports point one way and heavy libraries stay in their rooms; and the walks in docs/architecture.md are what a
tracer finds: the modules that one token, and one Verify, enter.

`python -m tests.test_imports` traces, in a process of its own, where no thread is older than the tracer. It prints two
lists as JSON: the modules at the edge that a verified round enters, and those at the server.
"""

import ast
import json
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skydraft
from skydraft.cli import generate as command
from skydraft.cli.main import run

from .serving import serving
from .starting import ROOT

PACKAGE = ROOT / "skydraft"
_LEAVES = {"types", "errors", "characters", "config", "files", "grammars", "intervals", "thinking"}
_CONTRACT = _LEAVES | {"engines.base", "engines.options", "engines.vocab"}
_QUESTIONS = {"choosing", "gating", "prompts", "protocol"}
_MACHINERY = {"edge", "decoding", "models"}
_USERS = _CONTRACT | _QUESTIONS | _MACHINERY | {"api"}  # what those who use the interface may import

# room: what it may import besides itself; docs/architecture.md draws it
ALLOWED: dict[str, set[str]] = {
    **{room: set() for room in ("types", "errors", "characters", "files", "thinking")},
    "intervals": {"files"},
    "origins": {"types"},
    "grammars": {"errors"},
    "config": {"errors", "grammars"},
    **dict.fromkeys(("engines", "protocol"), _LEAVES),
    **dict.fromkeys(("choosing", "gating", "prompts"), _CONTRACT),
    "models": {"characters", "errors", "files"},
    "access": {"errors", "config", "files"},
    "decoding": _CONTRACT | {"choosing", "gating", "prompts"},
    "edge": _CONTRACT | {"choosing", "decoding", "protocol"},
    "cloud": _CONTRACT | {"access", "choosing", "decoding", "protocol", "__version__"},
    "api": _CONTRACT
    | _QUESTIONS
    | _MACHINERY
    | {"engines.fitting", "engines.llama.weights", "engines.probe", "engines.registry", "engines.toy"},
    "gateway": _USERS | {"access"},
    "lab": _USERS
    | {"engines.adapter", "engines.checkpoints.trainable", "engines.probe", "engines.toy", "origins", "__version__"},
    "cli": _USERS | {"access", "cloud", "gateway", "lab", "origins", "__version__"},
    "__init__": _LEAVES - {"characters", "files"}
    | {"api", "decoding", "engines.base", "engines.options", "gating.gates", "prompts"},
}
# library: rooms that may import it, and whether only inside of functions
HEAVY: dict[str, tuple[str, ...]] = {
    "torch": ("engines", "lab"),
    **dict.fromkeys(("transformers", "peft", "gguf", "llama_cpp"), ("engines",)),
    **dict.fromkeys(("soundfile", "soxr"), ("prompts",)),
    "llguidance": ("choosing",),
    "grpc": ("protocol", "cloud", "edge"),
    "httpx2": ("edge",),
    "click": ("cli",),
    **dict.fromkeys(("starlette", "uvicorn"), ("gateway",)),
}
_LATE = HEAVY.keys() - {"grpc", "click", "starlette", "uvicorn"}
# A quarter of a second of each start.
_SLOW = {"httpx2", "numpy.f2py"}


def modules() -> Iterator[tuple[str, str, Path]]:
    """(room, dotted name, path) of every module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield parts[0], ".".join(("skydraft", *parts)).removesuffix(".__init__"), path


def imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """(imported name, whether at module level); names behind TYPE_CHECKING count as well."""
    top = {id(node) for node in getattr(tree, "body", [])}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"skydraft.{alias.name}" for alias in node.names] if node.module == "skydraft" else [node.module]
            yield from ((name or "", id(node) in top) for name in names)


def violations(room: str, source: str) -> list[str]:
    found = []
    for name, at_top in imports(ast.parse(source)):
        library, _, inner = name.partition(".")
        if library == "skydraft" and not any(_is_in(inner, place) for place in (*ALLOWED[room], room)):
            found.append(f"{room} imports {name}")
        if library in HEAVY and (room not in HEAVY[library] or (library in _LATE and at_top)):
            found.append(f"{room} imports {name}{' at the top' if at_top else ''}")
    return found


def _is_in(name: str, place: str) -> bool:
    return name == place or name.startswith(place + ".")


DOCUMENT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def walk(title: str) -> set[str]:
    """The modules of a walk, which states how many they are."""
    text = re.search(rf"\*\*{title}[^*]*: (\d+) modules[^*]*\*\*(.*?)\n\n", DOCUMENT + "\n\n", re.S)
    assert text
    modules = re.findall(r"`([\w.]+)`", text[2])
    assert len(modules) == len(set(modules)) == int(text[1])
    return set(modules)


_VALUES = {"types", "errors", "protocol.values"}  # what travels


class Tracer:
    """Modules of the package that were entered since `clear`, apart for the edge's two threads and all others."""

    def __init__(self) -> None:
        self.edge: set[str] = set()
        self.others: set[str] = set()
        self.verified: list[tuple[set[str], set[str]]] = []

    def __call__(self, frame: Any, event: str, arg: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("skydraft."):
            thread = threading.current_thread()
            is_edge = thread is threading.main_thread() or thread.name == "skydraft edge"
            (self.edge if is_edge else self.others).add(name.removeprefix("skydraft."))

    def shown(self, tokens: Any) -> None:
        if all(token.origin in ("accepted", "recovered", "bonus") for token in tokens) and tokens[0].round > 2:
            self.verified.append((set(self.edge), set(self.others)))
        self.edge.clear()
        self.others.clear()


def main() -> None:
    tracer, show = Tracer(), command.show_tokens
    threading.setprofile(tracer)

    def shown(console: Any, tokens: Any) -> None:
        show(console, tokens)
        tracer.shown(tokens)

    command.show_tokens = shown
    with serving(skydraft.load("toy")) as server:
        sys.setprofile(tracer)
        given = f"--mode quality --hand-back 0 --cloud {server.address} --edge-model toy:drift=0.2 -n 60 -q".split()
        assert run(["generate", "你好世界", *given]) == 0
        sys.setprofile(None)
    assert tracer.verified, "no round was verified"
    edge, cloud = min(tracer.verified, key=lambda sides: len(sides[0] | sides[1]))
    # The command's own loop runs in a frame that is entered once.
    print("\n" + json.dumps([sorted(edge - _VALUES | {"cli.generate"}), sorted(cloud - _VALUES)]))


@pytest.mark.parametrize(("room", "name", "path"), [pytest.param(*m, id=m[1]) for m in modules()])
def test_imports_point_one_way(room: str, name: str, path: Path) -> None:
    assert violations(room, path.read_text()) == []


@pytest.mark.parametrize(("code", "absent"), [
    (
        "import skydraft.cli.main as m;"
        "assert m.run(['generate', '你好', '--edge-model', 'toy', '--cloud-model', 'toy', '--quiet']) == 0;"
        "import skydraft.cloud.server, skydraft.prompts.audio, skydraft.engines.llama.engine;"
        "import skydraft.engines.checkpoints.omni",
        _LATE | _SLOW,
    ),
    (
        "import os; os.environ.pop('GRPC_VERBOSITY', None); from skydraft import *; load_audio;"
        "os.environ['GRPC_VERBOSITY']",  # which gRPC reads when it is imported
        _LATE | _SLOW | {"asyncio", "grpc", "ssl"},
    ),
])  # fmt: skip
def test_no_heavy_library_is_loaded_where_nobody_asked_for_it(code: str, absent: set[str]) -> None:
    code += f"\nimport sys; sys.exit(bool({absent} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_files_and_functions_stay_readable() -> None:
    files = Counter(path.parent for _, _, path in modules() if path.stem not in ("__init__", "verifier_pb2"))
    assert [folder for folder, number in files.items() if folder != PACKAGE and number > 14] == []
    for _, name, path in modules():
        source = path.read_text()
        assert source.count("\n") <= 400, name
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert (node.end_lineno or 0) - node.lineno < 80, f"{name}.{node.name}"


def test_a_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for _, name, path in modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_the_walks_are_those_of_the_architecture() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.test_imports"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    edge, cloud = map(set, json.loads(done.stdout.splitlines()[-1]))
    assert edge == walk("One token") and len(edge) <= 17
    assert cloud == walk("One Verify") and len(cloud) <= 14


if __name__ == "__main__":
    main()
