"""`skydraft compare` and its folder: one at a time, and nothing found out after hours that could be said at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ..comparing import PROMPTS, compare_args, generations, write_prompts
from .conftest import Invoke

RECORDS = "records.jsonl"


@contextmanager
def running(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A comparison that takes long and has begun to write; it is killed at the end."""
    args = compare_args(folder, "--min-new-tokens", "900", "--repetitions", "500", modes="edge,cloud", tokens=900)
    with subprocess.Popen(
        [sys.executable, "-m", "skydraft.cli.main", *args],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"SKYDRAFT_HOME": str(folder / "home")},
    ) as child:  # fmt: skip
        try:
            end, records = time.monotonic() + 60, folder / "out" / RECORDS
            while not (records.exists() and records.read_bytes().count(b"\n") > 1):
                assert time.monotonic() < end and child.poll() is None
                time.sleep(0.05)
            yield child
        finally:
            child.kill()


def test_a_second_comparison_in_a_folder_is_refused_and_harms_nothing(tmp_path: Path, invoke: Invoke) -> None:
    write_prompts(tmp_path)
    again = compare_args(tmp_path, modes="edge,cloud")
    with running(tmp_path) as child:
        status, out, err = invoke(*again)
        assert (status, out) == (2, "")
        assert err == (
            f"skydraft: Another comparison is writing to {tmp_path / 'out'}. "
            "Give another --out, or wait until that one is done.\n"
        )
        assert child.poll() is None
        child.send_signal(signal.SIGKILL)
        child.wait()
    lines = (tmp_path / "out" / RECORDS).read_bytes().split(b"\n")[:-1]
    assert [json.loads(line)["kind"] for line in lines] == ["run"] + ["generation"] * (len(lines) - 1)
    # What a killed process leaves does not stand in the way.
    assert "holds another run" in invoke(*again)[2]
    (tmp_path / "out" / RECORDS).unlink()
    assert invoke(*again)[0] == 0 and len(generations(tmp_path / "out")) == 10


def test_a_refused_comparison_leaves_no_empty_folder(tmp_path: Path, invoke: Invoke) -> None:
    write_prompts(tmp_path)
    assert invoke(*compare_args(tmp_path, modes="edge"), "--edge-model", "qwen2.5-coder-0.5")[0] == 2
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path, invoke: Invoke) -> None:
    write_prompts(tmp_path)
    (tmp_path / "out").touch()
    status, _, err = invoke(*compare_args(tmp_path, modes="edge"))
    assert status == 2 and "cannot be written" in err and err.count("\n") == 1


@pytest.mark.parametrize("package", ["matplotlib", "sacrebleu"])
def test_what_a_report_lacks_is_said_before_models_load(
    tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    write_prompts(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    args = compare_args(tmp_path, "--no-scores", modes="edge,cloud")
    status, out, err = invoke(*args, "--edge-model", "not-even-looked-for")
    assert (status, out) == (1, "") and err.count("\n") == 1
    assert package in err and "pip install 'skydraft[report]', or add --no-report." in err
    assert not (tmp_path / "out").exists()
    assert invoke(*args, "--no-report")[0] == 0
    assert len(generations(tmp_path / "out")) == 10 and not (tmp_path / "out" / "report.html").exists()


def test_texts_without_references_need_no_package_for_them(
    tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_prompts(tmp_path, [prompt for prompt in PROMPTS if "references" not in prompt])
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    assert invoke(*compare_args(tmp_path, "--no-scores", modes="edge,cloud"))[0] == 0
    assert (tmp_path / "out" / "report.html").exists()
