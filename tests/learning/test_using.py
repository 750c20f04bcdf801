"""From --learn to an adapter in use, through the commands, on tiny checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from skydraft.cli.main import run
from skydraft.engines.adapter import read_adapter, write_adapter
from skydraft.gating.calibration import read_calibration
from skydraft.learning.dataset import choose, prompt_digest
from skydraft.learning.lessons import Store
from skydraft.models.applied import all_applied, apply

from ..engines.adapters import change
from ..later import later
from .conftest import prompts

later("peft")

Call = Callable[..., tuple[int, str, str]]
TRAIN = ("--layers", "1", "--rank", "8", "--rate", "0.02")
ASK = ("generate", "今天天气", "-n", "24", "-q")


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command; returns (exit status, stdout, stderr)."""
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setattr("skydraft.learning.dataset.guard_prompts", lambda: tuple(prompts(12, seed=5)))
    monkeypatch.setattr("skydraft.learning.dataset.GUARD_TOKENS", 8)

    def invoke(*args: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = run([*args])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return invoke


@pytest.fixture
def call(bare: Call, pair_folders: tuple[Path, Path]) -> Call:
    """As `bare`, with the pair."""
    target, draft = pair_folders
    names = ["--edge-model", str(draft), "--cloud-model", str(target), "--threads", "1", "--context", "640"]
    return lambda *args: bare(*args, *names)


def test_trained_applied_used_calibrated_and_taken_back(
    call: Call, pair: tuple[Any, Any], taught: Path, tmp_path: Path
) -> None:
    out = tmp_path / "adapter.gguf"
    status, said, err = call("learn", "train", str(taught), "--out", str(out), *TRAIN)
    assert status == 0, said + err
    assert "α on held-out answers" in said and "α on general prompts" in said and out.is_file()
    assert not out.with_name("adapter.gguf.state").exists()
    trained_on = set(read_adapter(out).card.trained_on)
    lessons = choose(Store(taught)).lessons
    assert 0 < len(trained_on) < len({prompt_digest(one) for one in lessons})

    before = call(*ASK, "--mode", "edge")[1]
    with_it = call(*ASK, "--mode", "edge", "--edge-adapter", str(out))[1]
    assert with_it != before

    status, said, _ = call("learn", "apply", str(out), "--learn", str(taught))
    assert status == 0 and "is used with" in said and "Written to" in said, said
    assert "the adapter was trained on the others" in said
    out.unlink()  # a copy is used
    assert call(*ASK, "--mode", "edge")[1] == with_it
    (written,) = (tmp_path / "home" / "calibrations").glob("*.json")
    assert read_calibration(written).draft.fingerprint != pair[0].fingerprint
    # lossless with what was learned is still the target's own text, and a calibrated gate is there
    assert call(*ASK, "--mode", "lossless", "--k", "5")[1] == call(*ASK, "--mode", "cloud")[1]
    assert call(*ASK, "--gate", "calibrated:0.9")[0] == 0

    # an adapter is calibrated on answers that it has not seen
    only = Store(tmp_path / "only")
    for lesson in lessons:
        if prompt_digest(lesson) in trained_on:
            only.add(lesson)
    status, _, err = call("learn", "calibrate", str(only.folder))
    assert status == 2 and "trained on every answer" in err, err

    assert call("learn", "revert")[0] == 0
    assert call(*ASK, "--mode", "edge")[1] == before
    assert "There is no calibration" in call(*ASK, "--gate", "calibrated:0.9")[2]
    assert "No adapter is applied" in call("learn", "revert")[2]
    assert call("learn", "calibrate", str(only.folder))[0] == 0  # the draft model as it was has seen none
    assert call(*ASK, "--gate", "calibrated:0.9")[0] == 0


def test_what_does_not_help_or_costs_general_prompts_is_not_kept(
    call: Call, taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "adapter"
    short = ("--layers", "1", "--rank", "2", "--epochs", "1")
    status, said, _ = call("learn", "train", str(taught), "--out", str(out), *short, "--rate", "1e-9")
    assert status == 1 and "Not kept" in said and not out.exists()
    monkeypatch.setattr("skydraft.learning.training.MAX_GUARD_LOSS", -1.0)
    status, said, _ = call("learn", "train", str(taught), "--out", str(out), *TRAIN)
    assert status == 1 and "on general prompts it is worse" in said and not out.exists()


def test_wrong_use_is_one_line(call: Call, taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "noise").write_text("noise")
    write_adapter(tmp_path / "f.gguf", change("f" * 32, {"model.layers.1.self_attn.q_proj": (32, 32)}))
    out, noise, other = str(tmp_path / "a"), str(tmp_path / "noise"), str(tmp_path / "f.gguf")
    for args, says in (
        (("learn", "train", str(tmp_path / "none"), "--out", out), "Nothing was collected"),
        (("learn", "train", str(tmp_path), "--out", "/proc/none/a"), "There is no folder"),
        (("learn", "apply", noise), "is not an adapter"),
        (("learn", "apply", str(tmp_path / "none")), "cannot be read"),
        (("learn", "apply", other), "was trained for draft"),
        (("generate", "今天", "--edge-adapter", other), "was trained for draft"),
    ):
        status, _, err = call(*args)
        assert status == 2 and says in err and err.count("\n") == 1, err
    assert not (tmp_path / "home" / "adapters").exists()
    monkeypatch.setitem(sys.modules, "peft", None)
    status, _, err = call("learn", "train", str(taught), "--out", out)
    assert status == 1 and "needs peft, which is not installed" in err and "skydraft[learn]" in err


def test_the_last_adapter_that_was_applied_to_a_model_is_used(
    call: Call, bare: Call, tmp_path: Path, pair: tuple[Any, Any]
) -> None:
    draft, ask = pair[0], (*ASK, "--mode", "edge")
    files = [str(tmp_path / f"{seed}.gguf") for seed in (1, 2)]
    for seed, file in enumerate(files):
        write_adapter(Path(file), change(draft.fingerprint, {"model.layers.1.self_attn.q_proj": (32, 32)}, seed))
    plain, *alone = [call(*ask, *given)[1] for given in ((), *(("--edge-adapter", file) for file in files))]
    assert len({plain, *alone}) == 3
    for file, expected in zip((*files, files[0]), (*alone, alone[0]), strict=True):
        assert call("learn", "apply", file)[0] == 0
        assert call(*ask)[1] == expected
    named = ("--edge-model", f"{draft.path}/", "--threads", "1", "--context", "640")  # the same weights
    assert bare("learn", "apply", files[1], *named)[0] == 0
    lines = bare("models", "list")[1]
    assert f"{draft.path} " in lines and f"{draft.path}/ " in lines and "1.gguf" in lines and "2.gguf" in lines
    assert call("learn", "revert")[0] == 0
    assert (call(*ask)[1], bare(*ask, *named)[1]) == (plain, alone[1])


def test_models_that_are_applied_at_once_are_all_noted(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").write_text(name)
    models = [f"org/model-{number}" for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: apply(tmp_path / "a.gguf", name, tmp_path), models))
        list(pool.map(lambda name: apply(tmp_path / f"{name}.gguf", "one", tmp_path), "abababab"))
    assert list(all_applied(tmp_path)) == sorted(["one", *models])
