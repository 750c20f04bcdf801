"""From --learn to an adapter in use, through the commands, on tiny checkpoints."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest

from skydraft.cli.main import run
from skydraft.gating.calibration import read_calibration
from skydraft.learning.adapter import read_adapter, write_adapter
from skydraft.learning.dataset import Usable, choose, prompt_digest
from skydraft.learning.lessons import Store

from ..later import later
from .conftest import prompts
from .test_apply import adapter_for

later("peft")

Call = Any


@pytest.fixture
def call(
    pair_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """Run a command with the pair; returns (exit status, stdout, stderr)."""
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setattr("skydraft.learning.dataset.guard_prompts", lambda: tuple(prompts(12, seed=5)))
    monkeypatch.setattr("skydraft.learning.dataset.GUARD_TOKENS", 8)
    target, draft = pair_folders
    names = ["--edge-model", str(draft), "--cloud-model", str(target), "--threads", "1", "--context", "640"]

    def bare(*args: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = run([*args])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    def invoke(*args: str) -> tuple[int, str, str]:
        return bare(*args, *names)

    invoke.bare = bare  # type: ignore[attr-defined]  # without the pair's names
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
    assert call("generate", "今天天气", "--mode", "lossless", "--k", "5", "-n", "24", "-q")[1] == cloud
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
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "peft" else find(name))
    status, _, err = call("learn", "train", str(taught), "--out", str(tmp_path / "a"))
    assert status == 1 and "peft is not installed" in err and "skydraft[learn]" in err


def test_what_was_merged_and_is_gone_is_named(call: Call, taught: Path, tmp_path: Path, pair: tuple[Any, Any]) -> None:
    write_adapter(tmp_path / "a.safetensors", adapter_for(pair[0].fingerprint, (32, 32)))
    assert call("learn", "apply", str(tmp_path / "a.safetensors"))[0] == 0
    shutil.rmtree(tmp_path / "home" / "adapted")
    status, _, err = call("generate", "今天", "--mode", "edge", "-n", "4")
    assert status == 1 and "is gone or damaged" in err and "learn apply" in err


def adapters(pair: tuple[Any, Any], folder: Path, *sizes: float) -> list[str]:
    """Files of adapters of the draft model, each another one."""
    paths = [str(folder / f"{size}.safetensors") for size in sizes]
    for size, path in zip(sizes, paths, strict=True):
        write_adapter(Path(path), adapter_for(pair[0].fingerprint, (32, 32), size))
    return paths


def adapted(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "adapted").iterdir() if path.is_dir())


def listed(call: Call, home: Path) -> list[str]:
    """The lines of `models list` about adapted models."""
    return [line for line in call.bare("models", "list")[1].splitlines() if any(n in line for n in adapted(home))]


def test_an_adapter_that_is_applied_replaces_the_one_before(call: Call, tmp_path: Path, pair: tuple[Any, Any]) -> None:
    one, other = adapters(pair, tmp_path, 0.3, 0.31)
    assert call("learn", "apply", one)[0] == 0
    (first,) = adapted(tmp_path / "home")
    made = (tmp_path / "home" / "adapted" / first).stat().st_mtime_ns
    assert call("learn", "apply", one)[0] == 0
    assert adapted(tmp_path / "home") == [first]
    assert (tmp_path / "home" / "adapted" / first).stat().st_mtime_ns == made  # used again, not made again
    assert call("learn", "apply", other)[0] == 0
    (second,) = adapted(tmp_path / "home")
    assert second != first
    assert call("learn", "revert")[0] == 0
    assert adapted(tmp_path / "home") == []


def test_what_another_model_is_used_with_stays(call: Call, tmp_path: Path, pair: tuple[Any, Any]) -> None:
    one, other = adapters(pair, tmp_path, 0.3, 0.31)
    assert call("learn", "apply", one)[0] == 0
    named = ("--edge-model", f"{pair[0].path}/")  # the same weights by another name
    assert call.bare("learn", "apply", one, *named, "--threads", "1")[0] == 0
    (first,) = adapted(tmp_path / "home")
    assert call("learn", "apply", other)[0] == 0
    assert len(adapted(tmp_path / "home")) == 2
    assert call("learn", "revert")[0] == 0
    assert adapted(tmp_path / "home") == [first]
    assert call.bare("learn", "revert", *named)[0] == 0
    assert adapted(tmp_path / "home") == []


def test_an_adapter_that_was_trained_again_leaves_nothing_of_its_former_self(
    call: Call, tmp_path: Path, pair: tuple[Any, Any]
) -> None:
    path, other = adapters(pair, tmp_path, 0.3, 0.32)
    for size in (0.3, 0.31):
        write_adapter(Path(path), adapter_for(pair[0].fingerprint, (32, 32), size))
        assert call("generate", "今天", "--mode", "edge", "-n", "4", "--edge-adapter", path)[0] == 0
        assert len(adapted(tmp_path / "home")) == 1
    assert call("generate", "今天", "--mode", "edge", "-n", "4", "--edge-adapter", other)[0] == 0
    assert len(adapted(tmp_path / "home")) == 2


def test_adapted_models_are_listed_and_removed(call: Call, tmp_path: Path, pair: tuple[Any, Any]) -> None:
    one, other = adapters(pair, tmp_path, 0.3, 0.31)
    assert call("learn", "apply", one)[0] == 0
    (applied,) = adapted(tmp_path / "home")
    assert call("generate", "今天", "--mode", "edge", "-n", "4", "--edge-adapter", other)[0] == 0
    (tried,) = set(adapted(tmp_path / "home")) - {applied}
    lines = {name: line for line in listed(call, tmp_path / "home") for name in (applied, tried) if name in line}
    assert one in lines[applied] and other in lines[tried]
    assert " MB" in lines[tried] and str(pair[0].path) in lines[applied]
    status, out, _ = call.bare("models", "remove", tried)
    assert status == 0 and tried in out and adapted(tmp_path / "home") == [applied]
    status, _, err = call.bare("models", "remove", applied)
    assert status == 2 and "learn revert" in err and adapted(tmp_path / "home") == [applied]
    assert call("learn", "revert")[0] == 0
    assert listed(call, tmp_path / "home") == []


def test_an_adapter_of_another_base_is_refused_in_one_line(call: Call, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a.safetensors", adapter_for("f" * 32, (32, 32)))
    for args in (("learn", "apply", str(tmp_path / "a.safetensors")),
                 ("generate", "今天", "--edge-adapter", str(tmp_path / "a.safetensors"))):  # fmt: skip
        status, _, err = call(*args)
        assert status == 2 and "was trained for draft" in err and err.count("\n") == 1
