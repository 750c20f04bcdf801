"""A run that dies or finds no room at any of its steps goes on with the same command, to the same adapter."""

import json
import os
import subprocess
import sys
from pathlib import Path

from ..later import later
from .conftest import prompts
from .dying import MOMENTS

later("peft")


def test_deaths_and_full_disks_change_nothing(pair_folders: tuple[Path, Path], tmp_path: Path) -> None:
    asked, out, homes = tmp_path / "asked.txt", tmp_path / "out.json", [tmp_path / "calm", tmp_path / "hard"]
    asked.write_text("\n".join(prompts(30)))
    target, draft = map(str, pair_folders)
    command = ["learn", "run", "task", "--prompts", str(asked), "--edge-model", draft, "--cloud-model", target]
    command += ["--threads", "1", "--context", "640", "-n", "24", "-y"]
    script = [sys.executable, "-m", "tests.learning.dying", str(out), *map(str, homes), *command]
    subprocess.run(script, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=900, capture_output=True)
    calm, *hard, last = json.loads(out.read_text())
    assert calm[0] == last[0] == 0, (calm, last)
    assert sum(status == -9 for status, _ in hard) == len(MOMENTS)
    full = [said for status, said in hard if status in (1, 2)]
    assert len(full) == sum(writes for *_, writes in MOMENTS) == len(hard) - len(MOMENTS)
    for said in full:
        lines = [line for line in said.splitlines() if line.startswith("skydraft: ") and "measuring" not in line]
        assert len(lines) == 1 and "No space left on device" in lines[0], said
    adapters = [next(home.glob("adapters/*/task/adapter.gguf")).read_bytes() for home in homes]
    assert adapters[0] == adapters[1]
    left = {path.name for path in next(homes[1].glob("adapters/*/task")).iterdir() if not path.match("*lock")}
    assert left == {"adapter.gguf", "last-run", "lessons.jsonl"}
