"""What vLLM cannot hold is refused before it starts, in one line; none of this needs vLLM."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from skydraft.cli.main import run
from skydraft.cloud.vllm import launch
from skydraft.cloud.vllm.launch import Stderr, launch_error, library, read_args, read_config
from skydraft.errors import BrokenModel, MissingDependency, OptionError

KNOWN = {"gpu_memory_utilization": 1, "tensor_parallel_size": 1, "enable_lora": 1, "block_size": 1, "kv_cache_dtype": 1}


def folder(tmp_path: Path, **config: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def found(name: str) -> str:
        if name != "vllm" or version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(launch, "version", found)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm") if version else None)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_arguments_are_values_of_vllms() -> None:
    given = ("gpu-memory-utilization=0.5", "--block_size=32", "kv_cache_dtype=auto", "enable_lora=False")
    assert read_args(given, KNOWN) == {
        "gpu_memory_utilization": 0.5, "block_size": 32, "kv_cache_dtype": "auto", "enable_lora": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        ("block_size", "takes NAME=VALUE"),
        ("blok_size=3", "no engine argument blok_size. Did you mean block_size?"),
        ("zzz=3", "no engine argument zzz"),
        ("max_model_len=9", "skydraft sets it. Use context"),
        ("runner=generate", "skydraft sets it"),
        ("tensor_parallel_size=2", "several workers are not tested"),
        ("enable_lora=true", "adapters"),
    ],
)
def test_an_argument_that_cannot_be_is_refused(arg: str, message: str) -> None:
    with pytest.raises(OptionError) as refused:
        read_args((arg,), KNOWN)
    assert message in str(refused.value)


def test_one_worker_may_be_asked_for_by_name() -> None:
    assert read_args(("tensor_parallel_size=1",), KNOWN) == {"tensor_parallel_size": 1}


def test_a_model_that_is_no_causal_language_model_of_a_known_kind_is_refused(tmp_path: Path) -> None:
    assert read_config(folder(tmp_path, architectures=["Qwen2ForCausalLM"]))["architectures"]
    for config in (
        {"architectures": ["BertModel"]},
        {"architectures": []},
        {},
        {"architectures": ["JambaForCausalLM"]},
    ):
        with pytest.raises(BrokenModel):
            read_config(folder(tmp_path, **config))
    (tmp_path / "config.json").unlink()
    with pytest.raises(BrokenModel):
        read_config(tmp_path)


def test_vllm_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    installed(monkeypatch, None)
    assert run(["serve", "--engine", "vllm", "--model", "/nowhere"]) == 1
    assert "vllm is not installed" in one_line(capsys)


def test_another_version_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    installed(monkeypatch, "0.31.1")
    assert run(["serve", "--engine", "vllm", "--model", "/nowhere"]) == 1
    assert "0.31.1 is installed" in one_line(capsys)
    installed(monkeypatch, "0.32.5")
    assert library()[1] == "0.32.5"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--gpu-layers", "3"], "--gpu-layers does not apply"),
        (["--quantization", "8bit"], "--quantization does not apply"),
        (["--model", "qwen2.5-coder-1.5b"], "takes no GGUF file"),
        (["--model", "no-such-model"], "not a known model"),
    ],
)
def test_options_of_other_engines_are_refused(
    given: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(monkeypatch, "0.32.0")
    assert run(["serve", "--engine", "vllm", *given]) == 2
    assert message in one_line(capsys)


def test_an_argument_of_vllms_needs_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--model", "toy", "--vllm-arg", "block_size=32"]) == 2
    assert "--vllm-arg applies only to --engine vllm" in one_line(capsys)


def test_what_its_processes_wrote_says_why_it_does_not_start() -> None:
    stderr = Stderr()
    with stderr.taken():
        import subprocess

        says = "INFO all is well\nValueError: the KV cache of 0.1 GiB is too small\nRuntimeError: See root cause above."
        subprocess.run([sys.executable, "-c", f"import sys; sys.stderr.write({says!r})"], check=True)
    assert stderr.cause() == "the KV cache of 0.1 GiB is too small"
    error = launch_error(RuntimeError("Engine core initialization failed."), stderr)
    assert "too little memory: the KV cache of 0.1 GiB" in error.line and "\n" not in error.line
    wrong = "1 validation error for CacheConfig\nblock_size\n  Input should be a number [type=int, input=many]\n  More"
    stderr.close()
    stderr.close()
    assert launch_error(ValueError(wrong), stderr).message.endswith("block_size: Input should be a number")
    assert stderr.cause() == ""
    assert launch_error(RuntimeError("no"), stderr).message == "vLLM does not start: no"


def test_a_wrong_version_is_found_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "1.0")
    with pytest.raises(MissingDependency):
        library()
