"""Imports point one way, and heavy libraries stay in their rooms."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "skydraft"
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
    assert [folder for folder, number in files.items() if folder != ROOT and number > 14] == []
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
