"""What is used of a machine: small state files, whole or not there at all, whoever writes at the same time and wherever
a process ends; cores, of which a container has a share; and child processes, which never run code that lies in the
working folder, where anybody's download may be.
"""

import os
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from skydraft.choosing.grammar import complaint
from skydraft.cli.main import run
from skydraft.config import num_cores
from skydraft.errors import NetworkUnavailable, OptionError
from skydraft.files import read_file, write_whole
from skydraft.lab.tasks import sandbox
from skydraft.models.manifest import Part
from skydraft.models.sources import pip_wheel

from .starting import ROOT

PACKAGE = ROOT / "skydraft"


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
        assert sandbox.run("x = 1") == ""
    except OptionError as error:
        pytest.skip(str(error))


# Every module that can start a process, and what makes it start one.
CHILDREN: dict[str, Callable[[], None]] = {
    "skydraft/choosing/grammar.py": check_grammar,
    "skydraft/models/sources.py": download,
    "skydraft/lab/tasks/sandbox.py": run_code,
}


def test_a_reader_sees_one_of_the_writers_files_and_nothing_is_left_over(tmp_path: Path) -> None:
    path, contents = tmp_path / "state", [bytes([65 + number]) * 50_000 for number in range(4)]
    write_whole(path, contents[0])
    with ThreadPoolExecutor(4) as pool:
        writing = [pool.submit(write_whole, path, contents[number % 4]) for number in range(80)]
        while not all(each.done() for each in writing):
            assert path.read_bytes() in contents
    assert os.listdir(tmp_path) == ["state"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "state", b"before", 0o600)
    monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "state", b"after")
    assert (tmp_path / "state").read_bytes() == b"before" and os.listdir(tmp_path) == ["state"]
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o600


# What is no state of ours: files that users name, that grow by lines, or that are made in a scratch folder; downloads.
OTHERS = {
    "lab/evaluation/report/page.py", "lab/evaluation/runner.py", "models/fetch.py", "cli/caption.py",
    "engines/llama/weights.py",
}  # fmt: skip


WRITES = re.compile(r"\.write_(text|bytes)\(|NamedTemporaryFile|mkstemp|\bopen\([^)]*\"[wxa]b?\"")


def test_there_is_one_way_to_write_a_state_file() -> None:
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if WRITES.search(path.read_text())}
    assert found == OTHERS


@pytest.mark.parametrize("words", [
    "generate a --edge-model toy --cloud localhost:9 --cloud-token-file PIPE",
    "serve --model toy --port 0 --tls-cert PIPE --tls-key PIPE",
    "gateway --edge-model toy --port 0 --api-key-file PIPE",
])  # fmt: skip
def test_a_pipe_in_place_of_a_file_is_one_line(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    began = time.monotonic()
    assert run([str(tmp_path / "pipe") if word == "PIPE" else word for word in words.split()])
    said = capsys.readouterr().err
    assert "is not a file" in said and said.count("\n") <= 2 and time.monotonic() - began < 10, said


def test_pipes_of_the_shell_are_read() -> None:
    read, write = os.pipe()
    os.write(write, b"secret")
    os.close(write)
    assert read_file(Path(f"/dev/fd/{read}")) == b"secret"
    os.close(read)


@pytest.mark.parametrize(("share", "expected"), [("", 8), ("150000", 2), ("20000", 1), ("max", 8)])
def test_a_control_group(share: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cores of a process are the share of its control group."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(8), raising=False)
    if share:
        (tmp_path / "cpu.max").write_text(f"{share} 100000\n")
    assert num_cores(tmp_path) == expected


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
