"""Files that somebody damaged or wrote to do harm: a fine result or one clear error, soon and in little memory."""

import json
import os
import random
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skydraft.access.keys import Keyring
from skydraft.engines.options import EngineOptions
from skydraft.engines.probe import profile_of
from skydraft.engines.row_costs import RowProfile
from skydraft.engines.toy import open_toy
from skydraft.errors import SkydraftError
from skydraft.gating.calibration import read_calibration
from skydraft.gating.hand_back import HandBack
from skydraft.lab.learning.lessons import Store, encode

from .engines.adapters import change
from .gating.test_calibration import written as calibration
from .learning.conftest import lesson
from .mutating import as_bytes, flipped, mutated
from .starting import ROOT


def calibrations(folder: Path, rng: random.Random) -> None:
    (folder / "c.json").write_bytes(as_bytes(mutated(calibration(), rng), rng))
    found = read_calibration(folder / "c.json")
    assert 0 <= found.limit(found.curves[0].points[0].agreement, 5, HandBack()) < float("inf")


def lessons(folder: Path, rng: random.Random) -> None:
    store, skipped = Store(folder), Counter[str]()
    store.add(lesson(1))
    data = as_bytes(mutated(json.loads(encode(lesson(2))), rng), rng)
    with (folder / "lessons.jsonl").open("ab") as file:
        file.write(data + rng.choice([b"\n", b"\r", b""]))
        file.write(flipped(encode(lesson(3)), rng))
    store.add(lesson(4))
    found = [each.prompt_ids for each in store.lessons(skipped)]
    assert lesson(1).prompt_ids in found
    assert sum(skipped.values()) + len(found) >= 2


def profiles(folder: Path, rng: random.Random) -> None:
    good = {"key|16 rows": {"invariant_rows": 2, "forward_ms": [1.0, 2.0]}}
    (folder / "p.json").write_bytes(as_bytes(mutated(good, rng), rng))
    options = EngineOptions(profile_path=folder / "p.json")
    found = profile_of(TOY, "key", options)
    assert found.invariant_rows > 0 and 0 < min(found.forward_ms) <= max(found.forward_ms) < float("inf")


def adapters(folder: Path, rng: random.Random) -> None:
    pytest.importorskip("gguf")
    from skydraft.engines.adapter import read_adapter, write_adapter

    if not (folder / "whole").exists():
        write_adapter(folder / "whole", change("b" * 32, {"blk.0.attn_q.weight": (4, 3)}))
    whole = (folder / "whole").read_bytes()
    card = whole[whole.index(b'{"base"') : whole.index(b"}") + 1]
    changed = as_bytes(mutated(json.loads(card), rng), rng)
    changed += b" " * ((len(card) - len(changed)) % 32)  # what follows is aligned
    data = whole.replace(len(card).to_bytes(8, "little") + card, len(changed).to_bytes(8, "little") + changed)
    (folder / "a").write_bytes(rng.choice([data, flipped(whole, rng)]))
    read = read_adapter(folder / "a")
    assert read.fingerprint and all(low.ndim == high.ndim == 2 for low, high in read.pairs.values())


TOY = open_toy("toy")
READERS: list[Callable[[Path, random.Random], None]] = [calibrations, lessons, profiles, adapters]


@pytest.mark.parametrize("num", [150, pytest.param(3_000, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_any_file_is_read_or_one_error(reader: Any, num: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skydraft.engines.probe.probe", lambda engine, notify: RowProfile(1, (1.0,)))
    monkeypatch.setattr("skydraft.engines.probe.is_busy", lambda: False)  # which takes a moment to look
    monkeypatch.setattr("skydraft.files.log.warning", lambda *_: None)
    monkeypatch.setattr(os, "fsync", lambda file: None)
    rng, num_refused, slowest = random.Random(28), 0, 0.0
    tracemalloc.start()
    try:
        for number in range(num):
            (folder := tmp_path / str(number)).mkdir()
            began = time.process_time()
            try:
                reader(folder, rng)
            except SkydraftError as error:
                num_refused += 1
                assert "\n" not in str(error) and len(str(error)) < 1000
            slowest = max(slowest, time.process_time() - began)
            for path in sorted(folder.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
        assert tracemalloc.get_traced_memory()[1] < 40e6
    finally:
        tracemalloc.stop()
    assert slowest < 2.0
    assert num_refused < num  # it also met good files


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_token_file_open_to_others_is_named(mode: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tokens").write_text("ann a-token-of-24-characters\n")
    (tmp_path / "tokens").chmod(mode)
    Keyring(tmp_path / "tokens")
    assert [str(tmp_path / "tokens") in line for line in caplog.messages] == [True] * (mode != 0o600)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_the_shell_closed_leads_nowhere(closed: str) -> None:
    command = "generate 今天 --edge-model toy --mode edge -n 4"
    line = f"{sys.executable} -m skydraft.cli.main {command} {closed}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0 and "Traceback" not in done.stderr
