"""Imports point one way, and heavy libraries stay in their rooms."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "skydraft"
_LEAVES = {"skydraft.types", "skydraft.errors", "skydraft.characters", "skydraft.config"}
_CONTRACT = _LEAVES | {"skydraft.engines.base", "skydraft.engines.vocab"}

# room: prefixes of what it may import besides itself
ALLOWED: dict[str, set[str]] = {
    "types": set(),
    "errors": set(),
    "characters": set(),
    "config": {"skydraft.errors"},
    "engines": _LEAVES,
    "decoding": _CONTRACT,
    "protocol": _LEAVES,
    "cloud": _CONTRACT | {"skydraft.decoding", "skydraft.protocol"},
    "edge": _CONTRACT | {"skydraft.decoding", "skydraft.protocol"},
    "models": {"skydraft.errors"},
    "evaluation": _CONTRACT | {"skydraft.decoding"},
    "assembly": _CONTRACT | {"skydraft.decoding", "skydraft.models", "skydraft.edge"},
    "api": _CONTRACT
    | {
        "skydraft.assembly",
        "skydraft.engines.audio",
        "skydraft.engines.registry",
        "skydraft.decoding",
        "skydraft.models",
        "skydraft.evaluation",
        "skydraft.edge",
    },
    "__init__": {"skydraft"},
    "cli": {"skydraft"},
}
# library: rooms that may import it, and whether at module level
HEAVY: dict[str, tuple[str, ...]] = {
    "torch": ("engines",),
    "transformers": ("engines",),
    "llama_cpp": ("engines",),
    "soundfile": ("engines",),
    "soxr": ("engines",),
    "grpc": ("protocol", "cloud", "edge"),
    "click": ("cli",),
}


def modules() -> Iterator[tuple[str, str, Path]]:
    """(room, dotted name, path) of every module."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield parts[0], ".".join(("skydraft", *parts)).removesuffix(".__init__"), path


def imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """(imported name, whether at module level); names behind TYPE_CHECKING count as well."""
    top = {id(node) for node in getattr(tree, "body", [])}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or "", id(node) in top


def violations(room: str, source: str) -> list[str]:
    found = []
    for name, at_top in imports(ast.parse(source)):
        if name.split(".")[0] == "skydraft":
            own = name == f"skydraft.{room}" or name.startswith(f"skydraft.{room}.")
            if not own and not any(name == ok or name.startswith(ok + ".") for ok in ALLOWED[room]):
                found.append(f"{room} imports {name}")
        library = name.split(".")[0]
        if library in HEAVY and (room not in HEAVY[library] or (room == "engines" and at_top)):
            found.append(f"{room} imports {name}{' at the top' if at_top else ''}")
    return found


@pytest.mark.parametrize(("room", "name", "path"), [pytest.param(*m, id=m[1]) for m in modules()])
def test_imports_point_one_way(room: str, name: str, path: Path) -> None:
    assert violations(room, path.read_text()) == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("engines", "from skydraft.decoding.choose import Chooser"),
        ("decoding", "from skydraft.engines.llamacpp import LlamaCppEngine"),
        ("decoding", "import torch"),
        ("engines", "import torch"),
        ("engines", "import soundfile"),
        ("cli", "import soxr"),
        ("models", "from skydraft.api import load"),
        ("evaluation", "import grpc"),
    ],
)
def test_a_backward_arrow_is_found(room: str, source: str) -> None:
    assert violations(room, source)


def test_the_command_line_needs_neither_torch_nor_llama_cpp_to_start() -> None:
    code = (
        "import sys, skydraft.cli.main as m;"
        "status = m.run(['generate', '你好', '--edge-model', 'toy', '--mode', 'edge', '--quiet']);"
        "sys.exit(status or bool({'torch', 'transformers', 'llama_cpp', 'soundfile', 'soxr'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_files_and_functions_stay_readable() -> None:
    for _, name, path in modules():
        source = path.read_text()
        assert source.count("\n") <= 400, name
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert (node.end_lineno or 0) - node.lineno < 80, f"{name}.{node.name}"
