"""From --learn to an adapter in use, through the commands, on tiny checkpoints."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from skydraft.cli.main import run
from skydraft.engines.adapter import read_adapter, write_adapter
from skydraft.gating.calibration import read_calibration
from skydraft.learning.dataset import Usable, choose, prompt_digest
from skydraft.learning.lessons import Store
from skydraft.models.applied import all_applied, apply

from ..engines.adapters import change
from ..later import later
from .conftest import prompts

later("peft")
later("sklearn")

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
    out = tmp_path / "adapter.gguf"
    status, said, err = call("learn", "train", str(taught), "--out", str(out), *TRAIN)
    assert status == 0, said + err
    assert "α on held-out answers" in said and "α on general prompts" in said and out.is_file()
    assert not out.with_name("adapter.gguf.state").exists()

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
    out = tmp_path / "adapter.gguf"
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


def written(pair: tuple[Any, Any], path: Path, seed: int = 1) -> str:
    """The file of an adapter of the draft model."""
    write_adapter(path, change(pair[0].fingerprint, {"model.layers.1.self_attn.q_proj": (32, 32)}, seed))
    return str(path)


def test_the_last_adapter_that_was_applied_to_a_model_is_used(
    call: Call, tmp_path: Path, pair: tuple[Any, Any]
) -> None:
    ask = ("generate", "今天", "--mode", "edge", "-n", "16", "-q")
    files = [written(pair, tmp_path / f"{seed}.gguf", seed) for seed in (1, 2)]
    bare, *alone = [call(*ask, *given)[1] for given in ((), *(("--edge-adapter", file) for file in files))]
    assert len({bare, *alone}) == 3
    for file, expected in zip((*files, files[0]), (*alone, alone[0]), strict=True):
        assert call("learn", "apply", file)[0] == 0
        assert call(*ask)[1] == expected
    named = ("--edge-model", f"{pair[0].path}/", "--threads", "1", "--context", "640")  # the same weights
    assert call.bare(*ask, *named)[1] == bare
    assert call.bare("learn", "apply", files[1], *named)[0] == 0
    Path(files[0]).unlink()  # a copy is used
    lines = call.bare("models", "list")[1]
    assert f"{pair[0].path} " in lines and f"{pair[0].path}/ " in lines and "1.gguf" in lines and "2.gguf" in lines
    assert call("learn", "revert")[0] == 0
    assert (call(*ask)[1], call.bare(*ask, *named)[1]) == (bare, alone[1])
    assert "2.gguf" in call.bare("models", "list")[1]


def test_models_that_are_applied_at_once_are_all_noted(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").write_text(name)
    models = [f"org/model-{number}" for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: apply(tmp_path / "a.gguf", name, tmp_path), models))
        list(pool.map(lambda name: apply(tmp_path / f"{name}.gguf", "one", tmp_path), "abababab"))
    assert list(all_applied(tmp_path)) == sorted(["one", *models])


def test_an_adapter_of_another_base_is_refused_in_one_line(call: Call, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a.gguf", change("f" * 32, {"model.layers.1.self_attn.q_proj": (32, 32)}))
    for args in (("learn", "apply", str(tmp_path / "a.gguf")),
                 ("generate", "今天", "--edge-adapter", str(tmp_path / "a.gguf"))):  # fmt: skip
        status, _, err = call(*args)
        assert status == 2 and "was trained for draft" in err and err.count("\n") == 1
    assert not (tmp_path / "home" / "adapters").exists()
