"""From prompts, or from --learn, to an adapter in use, through the commands, on tiny checkpoints."""

import json
import re
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from skydraft.engines.adapter import digest, read_adapter, write_adapter
from skydraft.gating.calibration import read_calibration
from skydraft.lab.evaluation.records import read_records
from skydraft.lab.learning.calibrating import calibrate_lessons
from skydraft.lab.learning.lessons import Store
from skydraft.lab.learning.training import TrainSettings
from skydraft.models.adapters import folder_of, keep

from ..cli.conftest import Invoke, invoke  # noqa: F401
from ..engines.adapters import change
from ..later import later
from .conftest import prompts

later("peft")

SETTINGS = TrainSettings(rank=8, num_layers=1, rate=0.02)
ASK = ("generate", "今天天气", "-n", "24", "-q")
SYSTEM = "You check tokens of our model in the park."


def train_by(patch: pytest.MonkeyPatch, **changes: float) -> None:
    patch.setattr("skydraft.cli.learn_run._SETTINGS", replace(SETTINGS, **changes))  # type: ignore[arg-type]


@pytest.fixture
def bare(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> Invoke:  # noqa: F811
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


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    """A file of tasks: 96 prompts, each twice, and one that is too long."""
    check = {"kind": "regex", "pattern": "a"}
    path, texts = tmp_path / "asked.jsonl", [text for each in prompts(96) for text in (each, each)]
    path.write_text("".join(json.dumps({"prompt": each, "check": check}) + "\n" for each in (*texts, "x" * 3000)))
    return path


def test_a_task_is_learned_from_prompts_alone_and_used(call: Invoke, bare: Invoke, asked: Path, tmp_path: Path) -> None:
    before = call(*ASK, "--mode", "edge", "-s", SYSTEM)[1]
    status, said, err = call("learn", "run", "task", "--prompts", str(asked), "-s", SYSTEM, "-n", "12", "-y")
    assert status == 0, said + err
    assert "left out: 1 prompts of 640 tokens or more" in err
    assert "The target will write 96 answers" in err, err
    assert [line.split(":")[0] for line in said.splitlines()] == [
        "Agreement on held-out answers",
        "task is used from now on for conversations that begin like these prompts. Use it with --adapter task; in the "
        "gateway as skydraft",
        "Measure it on other prompts",
    ]
    home = next((tmp_path / "home" / "adapters").glob("*/task"))
    lessons = list(Store(home).lessons(Counter()))
    assert len(lessons) == 96 and not (home / "training").exists() and not (home / "trial.gguf").exists()
    trained_on = set(read_adapter(home / "adapter.gguf").card.trained_on)
    assert 0 < len(trained_on) < 96 and trained_on <= {digest(lesson.prompt_ids) for lesson in lessons}

    # where the system prompt is the app's, and nowhere else; by name everywhere
    learned = call(*ASK, "--mode", "edge", "-s", SYSTEM)[1]
    assert learned != before
    assert call(*ASK, "--mode", "edge", "-s", SYSTEM, "--adapter", "none")[1] == before
    other = call(*ASK, "--mode", "edge")[1]
    assert (named := call(*ASK, "--mode", "edge", "--adapter", "task")[1]) != other
    assert call(*ASK, "--mode", "edge", "--adapter", str(home / "adapter.gguf"))[1] == named
    # the target's own text stays that, and the calibrated gate has not been lost
    cloud = call(*ASK, "--mode", "cloud", "-s", SYSTEM)[1]
    assert call(*ASK, "--mode", "lossless", "--k", "5", "-s", SYSTEM)[1] == cloud
    assert call(*ASK, "--mode", "auto", "-s", SYSTEM)[0] == 0
    (written,) = (tmp_path / "home" / "calibrations").glob("*.json")
    assert read_calibration(written).draft.name.endswith("+task")

    # again: nothing is asked twice, and nothing is new
    status, said, err = call("learn", "run", "task", "--prompts", str(asked), "-s", SYSTEM, "-n", "12", "-y")
    assert (status, said) == (0, "Nothing is new since the last run, which is in use.\n") and "will write" not in err
    assert "learned: task" in bare("models", "list")[1]
    assert (
        "To undo the last training: skydraft learn revert" in call("learn", "forget", "task")[1]
        and not Store(home).files()
    )
    assert "was removed" in call("learn", "revert", "task")[1]
    assert call(*ASK, "--mode", "edge", "-s", SYSTEM)[1] == before
    assert "has no adapter 'task'" in call("learn", "revert", "task")[2]


def test_collected_lessons_teach(call: Invoke, bare: Invoke, taught: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = call(*ASK, "--mode", "edge")[1]
    status, said, err = call("learn", "run", "one", "--from", str(taught), "-y")
    assert status == 0, said + err
    assert "only when you name it" in said and call(*ASK, "--mode", "edge")[1] == before
    assert call(*ASK, "--mode", "edge", "--adapter", "one")[1] != before
    num_held_out = re.search(r"(\d+) held out", err)
    assert num_held_out and call("learn", "calibrate", str(taught), "--adapter", "one")[1].startswith(
        f"On {num_held_out[1]} answers "
    )
    train_by(monkeypatch, rank=2, epochs=1, rate=1e-9)
    status, said, _ = call("learn", "run", "nothing", "--from", str(taught), "-y")
    assert status == 1 and "Not kept" in said
    assert bare("models", "list")[1].count("learned: one") == 1


def test_what_was_forgotten_meanwhile_is_not_used(
    call: Invoke, taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_only_the_better_replaces(call: Invoke, taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in use is known again, and replaced only by what is better on the newest."""

    def learned(**changes: float) -> tuple[int, str, str]:
        train_by(monkeypatch, **changes)
        return call("learn", "run", "one", "--from", str(taught), "-y")

    assert learned()[0] == 0
    (used,) = tmp_path.glob("home/adapters/*/one/adapter.gguf")
    good = used.read_bytes()
    assert learned()[1].startswith("Nothing is new since the last run, which is in use")
    used.unlink()
    assert learned()[0] == 0 and used.read_bytes() == good  # one that is gone is not said to be in use
    for says in (
        "Not kept: on the held-out answers the gain is not certain",
        "Nothing is new since the last run, which k",
    ):
        status, said, _ = learned(epochs=1, rate=1e-9)
        assert status == 0 and says in said and used.read_bytes() == good
    status, said, _ = learned(epochs=1, rate=0.01)  # better than none, and worse than this
    assert status == 0 and "Not kept: it is not certainly better than the one in use" in said
    assert used.read_bytes() == good
    made = read_adapter(used)
    pairs = {name: (low, high * 0.01) for name, (low, high) in made.pairs.items()}  # as good as none
    write_adapter(used, replace(made, pairs=pairs))
    weak = used.read_bytes()
    assert learned()[0] == 0 and used.read_bytes() == good != weak
    assert weak in [path.read_bytes() for path in used.parent.glob("before-*.gguf")]


def test_one_name_is_learned_by_one_process_at_a_time(call: Invoke, taught: Path, tmp_path: Path) -> None:
    folder = tmp_path / "home" / "adapters"
    (tmp_path / "nothing").mkdir()
    call("learn", "run", "one", "--from", str(tmp_path / "nothing"), "-y")
    (lock,) = folder.glob("*/.one.lock")
    with FileLock(lock):
        status, said, err = call("learn", "run", "one", "--from", str(taught), "-y")
    assert (status, said) == (1, "") and err.startswith("skydraft: Another process is letting") and err.count("\n") == 1


def test_wrong_use(call: Invoke, asked: Path, taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is one line."""
    (tmp_path / "few.txt").write_text("one\ntwo\n")
    (tmp_path / "half.jsonl").write_text(r'{"prompt": "\ud83d"}')
    mixed = {"mixed": [{}, {"check": {"kind": "regex", "pattern": "a"}}], "spoken": [{"audio": "a.wav"}]}
    for name, lines in mixed.items():
        text = "\n\n".join(json.dumps({"prompt": f"{number}"} | line) for number, line in enumerate(lines * 24))
        (tmp_path / f"{name}.jsonl").write_text(text)
    given = ("--prompts", str(asked))
    for args, says in (
        (("learn", "run", "a"), "Give either --prompts FILE or --from DIR"),
        (("learn", "run", "a/b", *given), "cannot be the name of an adapter"),
        (("learn", "run", "auto", *given), "cannot be the name of an adapter"),
        (("learn", "run", "a", "--prompts", str(tmp_path / "few.txt")), "has 2 prompts, but 24 are needed"),
        (("learn", "run", "a", "--prompts", str(tmp_path / "mixed.jsonl")), "Line 1 of"),
        (("learn", "run", "a", "--prompts", str(tmp_path / "spoken.jsonl")), "has speech"),
        (("learn", "run", "a", "--prompts", str(tmp_path / "half.jsonl")), "it has half of a character"),
        (("learn", "run", "a", "--from", str(tmp_path / "none"), "-y"), "none has 0 usable answers"),
        (("learn", "forget", "nobody"), "There is nothing to forget"),
        (("learn", "export", "nowhere"), "nowhere is not a folder"),
    ):
        status, _, err = call(*args)
        lines = [line for line in err.splitlines() if line.startswith("skydraft: ")]
        assert status == 2 and says in lines[-1], (args, err)
    monkeypatch.setitem(sys.modules, "peft", None)
    status, _, err = call("learn", "run", "a", *given, "-y")
    assert status == 1 and "needs peft, which is not installed" in err and "skydraft[learn]" in err


def test_it_measures_with_the_adapter(call: Invoke, pair: Any, pair_folders: tuple[Path, Path], tmp_path: Path) -> None:
    """What is measured and calibrated is the draft model with its adapter."""
    asked, base, home = tmp_path / "asked.txt", pair[0].fingerprint, tmp_path / "home"
    asked.write_text("\n".join(prompts(6)))
    made = change(base, {"model.layers.1.self_attn.q_proj": (32, 32)})
    write_adapter(tmp_path / "made.gguf", made)
    keep((tmp_path / "made.gguf").read_bytes(), "one", str(pair_folders[1]), home)
    named = ("--prompts", str(asked), "-n", "24", "--adapter", "one")

    assert call("calibrate", *named)[0] == 0
    (written,) = (home / "calibrations").glob("*.json")
    assert read_calibration(written).draft.fingerprint == made.fingerprint
    status, said, err = call("compare", *named, "--modes", "edge,cloud,auto", "--out", str(tmp_path / "out"))
    assert status == 0, said + err
    records = read_records(tmp_path / "out" / "records.jsonl")
    assert (records.run.draft.fingerprint, records.run.draft.name[-4:]) == (made.fingerprint, "+one")
    alone = {line.token_ids for line in records.generations if line.mode == "edge"}
    assert all(line.drafted == line.token_ids for line in records.scores if line.token_ids in alone)

    # Without a name it is the model as it is.
    bare = ("compare", "--prompts", str(asked), "-n", "24", "--modes", "edge", "--out")
    assert call(*bare, str(tmp_path / "bare"))[0] == 0
    assert read_records(tmp_path / "bare" / "records.jsonl").run.draft.fingerprint == base
    assert "has no adapter 'two'" in call(*bare, str(tmp_path / "two"), "--adapter", "two")[2]


def test_forget(call: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair_folders: tuple[Path, Path]) -> None:
    """Who forgets a name means its answers, though a folder is called so."""
    monkeypatch.chdir(tmp_path)
    lessons = folder_of(str(pair_folders[1]), tmp_path / "home") / "reviews" / "lessons.jsonl"
    for folder in (lessons.parent, tmp_path / "reviews"):
        folder.mkdir(parents=True)
    lessons.write_text("noise")
    assert call("learn", "forget", "reviews")[0] == 0 and not lessons.exists()
    lessons.write_text("noise")
    (tmp_path / "reviews").rmdir()
    (tmp_path / "reviews").write_text("a file of prompts")
    assert call("learn", "forget", "reviews")[0] == 0 and not lessons.exists()
