"""From --learn to an adapter in use, through the commands, on tiny checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from skydraft.cli.main import run
from skydraft.errors import PromptError
from skydraft.evaluation.fitting import LabelledText, fit_lessons
from skydraft.gating.calibration import PairSide, read_calibration
from skydraft.learning.adapter import read_adapter
from skydraft.learning.dataset import Usable, choose, prompt_digest
from skydraft.learning.review import Reviewer
from skydraft.learning.store import Store
from skydraft.types import Signals

from .conftest import prompts

pytest.importorskip("peft")
pytest.importorskip("sklearn")

Call = Any


@pytest.fixture
def call(
    pair_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """Run a command with the pair; returns (exit status, stdout, stderr)."""
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("skydraft.learning.guard.guard_prompts", lambda: tuple(prompts(12, seed=5)))
    monkeypatch.setattr("skydraft.learning.guard.MAX_NEW_TOKENS", 8)
    target, draft = pair_folders
    names = ["--edge-model", str(draft), "--cloud-model", str(target), "--threads", "1", "--context", "640"]

    def invoke(*args: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = run([*args, *names])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return invoke


TRAIN = ("--layers", "1", "--rank", "8", "--rate", "0.02")


def test_trained_applied_used_calibrated_and_taken_back(
    call: Call, pair: tuple[Any, Any], taught: Path, tmp_path: Path
) -> None:
    out = tmp_path / "adapter.safetensors"
    status, said, err = call("learn", "train", str(taught), "--out", str(out), *TRAIN)
    assert status == 0, said + err
    assert "α on held-out answers" in said and "α on general prompts" in said and out.is_file()
    assert not out.with_name("adapter.safetensors.state").exists()

    before = call("generate", "今天天气", "--mode", "edge", "-n", "24", "-q")[1]
    with_it = call("generate", "今天天气", "--mode", "edge", "-n", "24", "-q", "--edge-adapter", str(out))[1]
    assert with_it != before

    status, said, _ = call("learn", "apply", str(out), "--learn", str(taught))
    assert status == 0 and "is used with" in said and "Written to" in said, said
    assert "the adapter was trained on the others" in said
    out.unlink()
    status, said, err = call("learn", "calibrate", str(taught))
    assert status == 0 and "the adapter was trained on the others" in said, err  # its file is not needed
    assert call("generate", "今天天气", "--mode", "edge", "-n", "24", "-q")[1] == with_it
    (written,) = (tmp_path / "home" / "calibrations").glob("*.json")
    assert read_calibration(written).draft.fingerprint != pair[0].fingerprint
    # lossless with what was learned is still the target's own text, and a calibrated gate is there
    cloud = call("generate", "今天天气", "--mode", "cloud", "-n", "24", "-q")[1]
    assert call("generate", "今天天气", "--mode", "lossless", "-n", "24", "-q")[1] == cloud
    assert call("generate", "今天天气", "--gate", "calibrated:0.9", "-n", "8", "-q")[0] == 0

    assert call("learn", "revert")[0] == 0
    assert call("generate", "今天天气", "--mode", "edge", "-n", "24", "-q")[1] == before
    assert "There is no calibration" in call("generate", "今天天气", "--gate", "calibrated:0.9", "-n", "8", "-q")[2]
    assert "No adapter is applied" in call("learn", "revert")[2]
    assert call("learn", "calibrate", str(taught))[0] == 0
    assert call("generate", "今天天气", "--gate", "calibrated:0.9", "-n", "8", "-q")[0] == 0


def test_an_adapter_is_calibrated_on_answers_that_it_has_not_seen(call: Call, taught: Path, tmp_path: Path) -> None:
    out = tmp_path / "adapter.safetensors"
    assert call("learn", "train", str(taught), "--out", str(out), *TRAIN)[0] == 0
    lessons = choose(Store(taught), Usable()).lessons
    trained_on = set(read_adapter(out).card.trained_on)
    assert len([one for one in lessons if prompt_digest(one) in trained_on]) == read_adapter(out).card.num_trained
    only = Store(tmp_path / "only")
    for lesson in lessons:
        if prompt_digest(lesson) in trained_on:
            only.add(lesson)
    status, _, err = call("learn", "calibrate", str(only.folder), "--edge-adapter", str(out))
    assert status == 2 and "trained on every answer" in err, err
    assert call("learn", "calibrate", str(only.folder))[0] == 0  # the draft model as it was has seen none


def test_limits_come_from_what_was_not_trained_on() -> None:
    sure, unsure = Signals(0.1, 0.9, 0.95), Signals(3.0, 0.1, 0.3)
    known = [LabelledText("target", (sure, unsure) * 20, (False,) * 37 + (True,) * 3) for _ in range(10)]
    unseen = [LabelledText("target", (sure, unsure) * 20, (False, True) * 20) for _ in range(10)]
    sides = PairSide(name="a", fingerprint="0"), PairSide(name="b", fingerprint="1")
    with pytest.raises(PromptError, match="3 tokens with 0 disagreements are too few"):
        fit_lessons(known, [LabelledText("target", (sure,) * 3, (False,) * 3)], *sides, "one", 40)
    with pytest.raises(PromptError, match="0 tokens"):
        fit_lessons(known, [], *sides, "one", 40)
    for texts in (known, unseen):
        found = fit_lessons(known, texts, *sides, "one", 40)
        assert found.curves[-1].points[-1].agreement == pytest.approx(texts[0].agreement, abs=0.002)
    assert found.curves[-1].points[0].agreement == 1  # where all is asked, nothing is left to chance


def test_fewer_texts_that_were_not_trained_on_ask_more_often() -> None:
    sure, unsure = Signals(0.1, 0.9, 0.95), Signals(3.0, 0.1, 0.3)
    wrong = [(False,) * 38 + (True, False), (False,) * 20 + (True,) * 4 + (False,) * 16, (False,) * 40]
    texts = [LabelledText("target", (sure, sure, unsure, sure) * 10, flags) for flags in wrong]
    sides = PairSide(name="a", fingerprint="0"), PairSide(name="b", fingerprint="1")
    limits = [fit_lessons(texts * 20, texts * times, *sides, "one", 40).limit(0.95, 12) for times in (1, 3, 30)]
    assert limits == sorted(limits) and limits[0] < limits[-1]


def test_what_does_not_help_is_not_kept(call: Call, taught: Path, tmp_path: Path) -> None:
    out = tmp_path / "adapter"
    status, said, _ = call("learn", "train", str(taught), "--out", str(out), *TRAIN[:4], "--rate", "1e-9")
    assert status == 1 and "Not kept" in said and not out.exists()


def test_what_costs_general_prompts_is_not_kept(
    call: Call, taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skydraft.learning.training.MAX_GUARD_LOSS", -1.0)
    status, said, _ = call("learn", "train", str(taught), "--out", str(tmp_path / "a"), *TRAIN)
    assert status == 1 and "on general prompts it is worse" in said


def test_wrong_use_is_one_line(
    call: Call, pair_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "noise").write_text("noise")
    out = str(tmp_path / "a")
    assert "Nothing was collected" in call("learn", "train", str(tmp_path / "none"), "--out", out)[2]
    assert "There is no folder" in call("learn", "train", str(tmp_path), "--out", "/proc/none/a")[2]
    assert "is not an adapter" in call("learn", "apply", str(tmp_path / "noise"))[2]
    assert "cannot be read" in call("learn", "apply", str(tmp_path / "none"))[2]


def test_a_missing_package_is_named_before_anything_is_loaded(
    call: Call, taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "peft" else find(name))
    status, _, err = call("learn", "train", str(taught), "--out", str(tmp_path / "a"))
    assert status == 1 and "peft is not installed" in err and "skydraft[learn]" in err


def test_what_was_merged_and_is_gone_is_named(call: Call, taught: Path, tmp_path: Path, pair: tuple[Any, Any]) -> None:
    from skydraft.learning.adapter import write_adapter

    from .test_merge import adapter_for

    write_adapter(tmp_path / "a.safetensors", adapter_for(pair[0].fingerprint, (32, 32)))
    assert call("learn", "apply", str(tmp_path / "a.safetensors"))[0] == 0
    shutil.rmtree(tmp_path / "home" / "adapted")
    status, _, err = call("generate", "今天", "--mode", "edge", "-n", "4")
    assert status == 1 and "is gone" in err and "learn apply" in err


def test_an_adapter_of_another_base_is_refused_in_one_line(call: Call, tmp_path: Path) -> None:
    from skydraft.learning.adapter import write_adapter

    from .test_merge import adapter_for

    write_adapter(tmp_path / "a.safetensors", adapter_for("f" * 32, (32, 32)))
    for args in (("learn", "apply", str(tmp_path / "a.safetensors")),
                 ("generate", "今天", "--edge-adapter", str(tmp_path / "a.safetensors"))):  # fmt: skip
        status, _, err = call(*args)
        assert status == 2 and "was trained for draft" in err and err.count("\n") == 1


def test_a_review_says_what_was_collected_and_signals_everywhere(pair: tuple[Any, Any], taught: Path) -> None:
    reviewer = Reviewer(pair[0])
    for lesson in choose(Store(taught), Usable()).lessons[:10]:
        found = reviewer.review(lesson)
        for index, (old, new) in enumerate(zip(lesson.marks, found.marks, strict=True)):
            assert old == new or (old == "t" and new in "ac")
            if (signals := lesson.signals_at(index)) is not None:
                assert found.signals_at(index) == pytest.approx(signals)
            assert found.signals_at(index) is not None
        assert reviewer.review(found) == found


def test_a_review_by_another_model_is_what_that_model_says(pair: tuple[Any, Any], taught: Path) -> None:
    lesson = choose(Store(taught), Usable()).lessons[0]
    assert set(Reviewer(pair[1]).review(lesson).marks) == {"a"}  # the target agrees with itself
