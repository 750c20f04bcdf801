"""Code that lies in the working folder, where anybody's download may be, is never run by a child process."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from skydraft.choosing.grammar import complaint
from skydraft.errors import NetworkUnavailable, OptionError
from skydraft.lab.tasks.sandbox import run
from skydraft.models.manifest import Part
from skydraft.models.sources import pip_wheel

from .starting import ROOT


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
        assert run("x = 1") == ""
    except OptionError as error:
        pytest.skip(str(error))


# Every module that can start a process, and what makes it start one.
CHILDREN: dict[str, Callable[[], None]] = {
    "skydraft/choosing/grammar.py": check_grammar,
    "skydraft/models/sources.py": download,
    "skydraft/lab/tasks/sandbox.py": run_code,
}


@pytest.mark.parametrize("start", CHILDREN.values(), ids=CHILDREN)
def test_children_run_no_local_code(start: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*sys.stdlib_module_names, "llguidance", "pip", "numpy", "grpc", "skydraft"}:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # where this checkout is not installed
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    start()
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


STARTER = re.compile(
    r"\b(import|from) (subprocess|multiprocessing|pty|runpy|concurrent\.futures\.process)\b"
    r"|\bos\.(system|popen|fork|exec|spawn|posix_spawn)|create_subprocess_"
)
UNSAFE = re.compile(r"(?<!\{)sys\.executable(?!, \"-P\")")  # text for people may name this Python


def test_every_child_is_in_the_table_and_starts_with_its_folder_left_out() -> None:
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "skydraft").rglob("*.py")}
    sources["skydraft_command.py"] = (ROOT / "skydraft_command.py").read_text()
    assert {name for name, source in sources.items() if STARTER.search(source)} == set(CHILDREN)
    assert [name for name, source in sources.items() if UNSAFE.search(source)] == []
