"""Code that lies in the working folder, where anybody's download may be, is never run by a child process."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from skydraft.choosing.grammar import complaint
from skydraft.errors import NetworkUnavailable, OptionError
from skydraft.evaluation.tasks.sandbox import run
from skydraft.models.manifest import Part
from skydraft.models.sources import pip_wheel

ROOT = Path(__file__).parent.parent


def check_grammar() -> None:
    pytest.importorskip("llguidance")
    complaint.cache_clear()
    assert complaint('{"grammars":[{"lark_grammar":"start: \\"a\\""}]}') == ""


def download() -> None:
    part = Part(package="x", version="1", wheel="x.whl", wheel_sha256="0" * 64, member="x", bytes=1)
    with pytest.raises(NetworkUnavailable):
        pip_wheel(part, Path("scratch"))


def run_code() -> None:
    try:
        assert run("x = 1").passed
    except OptionError as error:
        pytest.skip(str(error))


# Every module that can start a process, and what makes it start one.
CHILDREN: dict[str, Callable[[], None]] = {
    "skydraft/choosing/grammar.py": check_grammar,
    "skydraft/models/sources.py": download,
    "skydraft/evaluation/tasks/jail.py": run_code,
    "skydraft/evaluation/tasks/sandbox.py": run_code,
}


@pytest.mark.parametrize("start", CHILDREN.values(), ids=CHILDREN)
def test_no_child_runs_code_of_the_working_folder(
    start: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in {*sys.stdlib_module_names, "llguidance", "pip", "numpy", "grpc", "skydraft"}:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # where this checkout is not installed
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    start()
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


STARTERS = {"subprocess", "multiprocessing", "pty", "runpy", "concurrent.futures.process"}
CALL = re.compile(r"os\.(system|popen|fork|forkpty|exec.*|spawn.*|posix_spawn.*)|asyncio\.create_subprocess_.*")


def starts(source: str) -> Iterator[str]:
    """What in a module may start a process."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in STARTERS)
        elif isinstance(node, ast.ImportFrom) and node.module in STARTERS:
            yield node.module
        elif isinstance(node, ast.Attribute) and CALL.fullmatch(name := ast.unparse(node)):
            yield name


def unsafe(source: str) -> list[int]:
    """Lines that name this Python for a command whose next word is not -P; text for people may name it."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    named = {id(n) for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n) == "sys.executable"}
    shown = {id(inner) for n in nodes if isinstance(n, ast.JoinedStr) for inner in ast.walk(n)}
    safe = set()
    for node in nodes:
        words = node.elts if isinstance(node, (ast.List, ast.Tuple)) else []
        safe |= {id(word) for word, after in pairwise(words) if ast.unparse(after) == "'-P'"}
    return [node.lineno for node in nodes if id(node) in named - safe - shown and isinstance(node, ast.Attribute)]


def test_every_child_is_in_the_table_and_starts_with_its_folder_left_out() -> None:
    found = {}
    for path in sorted([*(ROOT / "skydraft").rglob("*.py"), ROOT / "skydraft_command.py"]):
        source = path.read_text()
        assert unsafe(source) == [], path
        if set(starts(source)):
            found[str(path.relative_to(ROOT))] = source
    assert set(found) == set(CHILDREN)


def test_new_ways_to_start_one_and_a_python_without_the_option_are_found() -> None:
    for planted in (
        "import subprocess", "def late(): from multiprocessing import Process", "os.system('x')", "os.execv('x', [])",
        "asyncio.create_subprocess_exec('x')",
    ):  # fmt: skip
        assert list(starts(planted)), planted
    assert unsafe("run([sys.executable, '-c', x])") == unsafe("python = (*a, sys.executable)") == [1]
    assert unsafe("run([sys.executable, '-P', '-c', x])") == unsafe("f'Run {sys.executable}'") == []
