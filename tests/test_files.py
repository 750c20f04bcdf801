"""Small state files: whole or not there at all, whoever writes at the same time and wherever a process ends."""

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from skydraft.cli.main import run
from skydraft.files import read_file, write_whole

ROOT = Path(__file__).parent.parent / "skydraft"


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
    found = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if WRITES.search(path.read_text())}
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
