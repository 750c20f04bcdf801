"""From prompts, or from --learn, to an adapter in use, through the commands, on tiny checkpoints; and a run that dies
or finds no room at any of its steps goes on with the same command, to the same adapter.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from pytest import MonkeyPatch

from skydraft.engines.adapter import digest, read_adapter, write_adapter
from skydraft.gating.calibration import read_calibration
from skydraft.lab.evaluation.records import Records, read_records
from skydraft.lab.learning.calibrating import calibrate_lessons
from skydraft.lab.learning.lessons import Store
from skydraft.lab.learning.training import TrainSettings
from skydraft.models.adapters import folder_of, keep

from ..cli.conftest import Invoke, invoke  # noqa: F401
from ..engines.adapters import change
from ..evaluation.lines import jsonl
from ..later import later
from .conftest import prompts
from .dying import MOMENTS

later("peft")

SETTINGS = TrainSettings(rank=8, num_layers=1, rate=0.02)
ASK = ("generate", "今天天气", "-n", "24", "-q")
SYSTEM = "You check tokens of our model in the park."


def train_by(patch: MonkeyPatch, **changes: float) -> None:
    patch.setattr("skydraft.cli.learn_run._SETTINGS", replace(SETTINGS, **changes))  # type: ignore[arg-type]


@pytest.fixture
def bare(invoke: Invoke, monkeypatch: MonkeyPatch) -> Invoke:  # noqa: F811
    """Run a command; returns (exit status, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "500")
    train_by(monkeypatch)
    return invoke


@pytest.fixture
def call(bare: Invoke, pair_folders: tuple[Path, Path]) -> Invoke:
    """As `bare`, with the pair."""
    target, draft = pair_folders
    names = ["--edge-model", str(draft), "--cloud-model", str(target), "--threads", "1", "--context", "640"]
    return lambda *args: bare(*args, *names)


def test_a_task_is_learned_from_prompts_alone_and_used(call: Invoke, bare: Invoke, tmp_path: Path) -> None:
    def says(*more: str, mode: str = "edge") -> str:
        status, out, err = call(*ASK, "--mode", mode, *more)
        assert status == 0, err
        return out

    # 96 prompts, each twice, and one that is too long
    check, texts = {"kind": "regex", "pattern": "a"}, [*prompts(96), *prompts(96), "x" * 3000]
    asked = str(jsonl(tmp_path / "asked.jsonl", *({"prompt": each, "check": check} for each in texts)))
    learn, app = ("learn", "run", "task", "--prompts", asked, "-s", SYSTEM, "-n", "12", "-y"), ("-s", SYSTEM)
    before = says(*app)
    status, said, err = call(*learn)
    assert status == 0, said + err
    assert "left out: 1 prompts of 640 tokens or more" in err and "The target will write 96 answers" in err, err
    assert said.startswith("Agreement on held-out answers")
    assert "conversations that begin like these prompts" in said
    home = next((tmp_path / "home" / "adapters").glob("*/task"))
    lessons = list(Store(home).lessons(Counter()))
    assert len(lessons) == 96 and not (home / "training").exists() and not (home / "trial.gguf").exists()
    trained_on = set(read_adapter(home / "adapter.gguf").card.trained_on)
    assert 0 < len(trained_on) < 96 and trained_on <= {digest(lesson.prompt_ids) for lesson in lessons}

    # where the system prompt is the app's, and nowhere else; by name everywhere
    assert says(*app) != before == says(*app, "--adapter", "none")
    assert says() != says("--adapter", "task") == says("--adapter", str(home / "adapter.gguf"))
    # the target's own text stays that, and the calibrated gate has not been lost
    assert says(*app, "--k", "5", mode="lossless") == says(*app, mode="cloud")
    assert says(*app, mode="auto")
    (written,) = (tmp_path / "home" / "calibrations").glob("*.json")
    assert read_calibration(written).draft.name.endswith("+task")

    # again: nothing is asked twice, and nothing is new
    status, said, err = call(*learn)
    assert (status, said) == (0, "Nothing is new since the last run, which is in use.\n") and "will write" not in err
    assert "learned: task" in bare("models", "list")[1]
    assert (
        "To undo the last training: skydraft learn revert" in call("learn", "forget", "task")[1]
        and not Store(home).files()
    )
    assert "was removed" in call("learn", "revert", "task")[1] and says(*app) == before


def test_collected_lessons_teach(call: Invoke, bare: Invoke, taught: Path, monkeypatch: MonkeyPatch) -> None:
    before = call(*ASK, "--mode", "edge")[1]
    status, said, err = call("learn", "run", "one", "--from", str(taught), "-y")
    assert status == 0, said + err
    assert "only when you name it" in said and call(*ASK, "--mode", "edge")[1] == before
    assert call(*ASK, "--mode", "edge", "--adapter", "one")[1] != before
    (num_held_out,) = re.findall(r"(\d+) held out", err)
    assert f"On {num_held_out} answers " in call("learn", "calibrate", str(taught), "--adapter", "one")[1]
    train_by(monkeypatch, rank=2, epochs=1, rate=1e-9)
    status, said, _ = call("learn", "run", "nothing", "--from", str(taught), "-y")
    assert status == 1 and "Not kept" in said
    assert bare("models", "list")[1].count("learned: one") == 1


def test_what_was_forgotten_is_not_used(call: Invoke, taught: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    store, calibrate = Store(shutil.copytree(taught, tmp_path / "taught")), calibrate_lessons

    def forget(*given: Any) -> Any:
        lessons = list(store.lessons(Counter()))
        store.forget()
        store.add(lessons[-2])  # somebody asked the newest one again
        return calibrate(*given)

    monkeypatch.setattr("skydraft.cli.learn_run.calibrate_lessons", forget)
    status, said, _ = call("learn", "run", "one", "--from", str(store.folder), "-y")
    assert status == 1 and "deleted meanwhile" in said, said
    assert not list(tmp_path.glob("home/adapters/*/one/[ab]*"))  # neither an adapter nor what was begun


def test_only_the_better_replaces(call: Invoke, taught: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """What is in use is known again, and replaced only by what is better on the newest."""

    def learned(says: str = "", **changes: float) -> bytes:
        """The adapter in use after a run that says this."""
        train_by(monkeypatch, **changes)
        status, said, err = call("learn", "run", "one", "--from", str(taught), "-y")
        assert status == 0 and says in said, said + err
        return used().read_bytes()

    def used() -> Path:
        (path,) = tmp_path.glob("home/adapters/*/one/adapter.gguf")
        return path

    good = learned()
    assert learned("Nothing is new since the last run, which is in use") == good
    used().unlink()
    assert learned() == good  # one that is gone is not said to be in use
    for says in (
        "Not kept: on the held-out answers the gain is not certain",
        "Nothing is new since the last run, which k",
    ):
        assert learned(says, epochs=1, rate=1e-9) == good
    # better than none, and worse than this
    assert learned("Not kept: it is not certainly better than the one in use", epochs=1, rate=0.01) == good
    made = read_adapter(used())
    pairs = {name: (low, high * 0.01) for name, (low, high) in made.pairs.items()}  # as good as none
    write_adapter(used(), replace(made, pairs=pairs))
    weak = used().read_bytes()
    assert learned() == good != weak
    assert weak in [path.read_bytes() for path in used().parent.glob("before-*.gguf")]


def test_a_name_is_learned_once_at_a_time(call: Invoke, taught: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    (tmp_path / "nothing").mkdir()
    assert "has 0 usable answers" in call("learn", "run", "one", "--from", str(tmp_path / "nothing"), "-y")[2]
    with FileLock(next(tmp_path.glob("home/adapters/*/.one.lock"))):
        status, said, err = call("learn", "run", "one", "--from", str(taught), "-y")
    assert (status, said) == (1, "") and err.startswith("skydraft: Another process is letting") and err.count("\n") == 1
    monkeypatch.setitem(sys.modules, "peft", None)
    status, _, err = call("learn", "run", "one", "--from", str(taught), "-y")
    assert status == 1 and "needs peft, which is not installed" in err and "skydraft[learn]" in err


def test_it_measures_with_the_adapter(call: Invoke, pair: Any, pair_folders: tuple[Path, Path], tmp_path: Path) -> None:
    """What is measured and calibrated is the draft model with its adapter; without a name it is the model as it is."""
    asked, base, home = tmp_path / "asked.txt", pair[0].fingerprint, tmp_path / "home"
    asked.write_text("\n".join(prompts(6)))
    made = change(base, {"model.layers.1.self_attn.q_proj": (32, 32)})
    write_adapter(tmp_path / "made.gguf", made)
    keep((tmp_path / "made.gguf").read_bytes(), "one", str(pair_folders[1]), home)
    given = ("--prompts", str(asked), "-n", "24")

    def measured(*more: str) -> Records:
        out = tmp_path / f"out{len(more)}"
        status, said, err = call("compare", *given, *more, "--modes", "edge,cloud,lossless", "--out", str(out))
        assert status == 0, said + err
        return read_records(out / "records.jsonl")

    assert call("calibrate", *given, "--adapter", "one")[0] == 0
    (written,) = (home / "calibrations").glob("*.json")
    assert read_calibration(written).draft.fingerprint == made.fingerprint
    records = measured("--adapter", "one")
    assert (records.run.draft.fingerprint, records.run.draft.name[-4:]) == (made.fingerprint, "+one")
    alone = {line.token_ids for line in records.generations if line.mode == "edge"}
    assert all(line.drafted == line.token_ids for line in records.scores if line.token_ids in alone)
    assert measured().run.draft.fingerprint == base


def test_forget(call: Invoke, tmp_path: Path, monkeypatch: MonkeyPatch, pair_folders: tuple[Path, Path]) -> None:
    """Who forgets a name means its answers, though a folder, or a file of prompts, is called so."""
    monkeypatch.chdir(tmp_path)
    lessons = folder_of(str(pair_folders[1]), tmp_path / "home") / "reviews" / "lessons.jsonl"
    lessons.parent.mkdir(parents=True)
    for make in (Path.mkdir, Path.touch):
        make(tmp_path / "reviews")
        lessons.write_text("noise")
        assert call("learn", "forget", "reviews")[0] == 0 and not lessons.exists()
        shutil.move(tmp_path / "reviews", tmp_path / "elsewhere")


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
