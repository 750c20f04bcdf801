"""What a server computes on: an engine in this process, or vLLM."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import click

from skydraft.cli.model_options import ServedModel, load_engine
from skydraft.cli.sections import Section, option
from skydraft.cli.terminal import TERMINAL
from skydraft.cloud.limits import Limits
from skydraft.config import Execution
from skydraft.engines.options import EngineOptions
from skydraft.errors import OptionError
from skydraft.models import cache_dir, progress_on
from skydraft.models.manifest import known_models
from skydraft.models.resolve import resolve

if TYPE_CHECKING:
    from skydraft.cloud.judge import Judge

EngineName = Literal["own", "vllm"]
_VLLM_TAKES = {"context_len", "dtype"}


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Which engine, how it computes (None: as exactly as it can), and arguments of vLLM's."""

    engine: EngineName
    execution: Execution | None
    vllm_arg: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.vllm_arg and self.engine != "vllm":
            raise OptionError("--vllm-arg applies to --engine vllm alone.", hint="Add --engine vllm, or leave it out.")

    @property
    def in_force(self) -> Execution:
        """The execution: exact, but on vLLM, whose kernels are seldom batch-invariant."""
        return self.execution or ("throughput" if self.engine == "vllm" else "exact")


engine_section = Section(
    "choice",
    "Server",
    EngineChoice,
    [
        option(
            "--engine", None, "own: what opens the model in this process. vllm: vLLM, for folders and hub ids "
            "(docs/vllm.md).",
            type=click.Choice(get_args(EngineName)), default="own",
        ),
        option("--vllm-arg", "NAME=VALUE", "An engine argument of vLLM's; can be repeated.", multiple=True),
        option(
            "--execution", None, "exact: each answer is, bit for bit, that of a request alone. throughput: one "
            "forward for all that wait, which is faster, but may decide near ties differently (default: exact; with "
            "vllm: throughput).",
            type=click.Choice(get_args(Execution)),
        ),
    ],
)  # fmt: skip


def open_judge(model: ServedModel, choice: EngineChoice, limits: Limits) -> Judge:
    """Load the model; afterwards the judge is ready to run. Raises what loading raises."""
    return _on_vllm(model, choice, limits) if choice.engine == "vllm" else _on_engine(model, choice, limits)


def _on_engine(model: ServedModel, choice: EngineChoice, limits: Limits) -> Judge:
    from skydraft.cloud.worker import Worker

    options = dataclasses.replace(
        model.options, max_sequences=limits.max_sessions, shared_cache=choice.in_force == "throughput"
    )
    engine = load_engine(model.name, options, offline=model.offline, source=model.source)
    return Worker(engine, limits, execution=choice.in_force)


def _on_vllm(model: ServedModel, choice: EngineChoice, limits: Limits) -> Judge:
    from skydraft.cloud.vllm.engine import VllmEngine
    from skydraft.cloud.vllm.judge import VllmJudge
    from skydraft.cloud.vllm.launch import VllmOptions, library

    library()  # whoever lacks it should not download a model first
    for field in dataclasses.fields(EngineOptions):
        if getattr(model.options, field.name) != field.default and field.name not in _VLLM_TAKES:
            name = "--" + field.name.removeprefix("num_").replace("_", "-")
            raise OptionError(f"{name} does not apply to --engine vllm.", hint="Use --vllm-arg for vLLM's own.")
    hint = "Give a checkpoint's folder or a hub id as --model."
    if model.name in known_models():
        raise OptionError(f"--engine vllm takes no GGUF file, which {model.name} is.", hint=hint)
    with TERMINAL.state("Starting vLLM…", quiet=False) as clear, progress_on() as progress:

        def told(done_bytes: int, total_bytes: int, label: str) -> None:
            clear()
            progress(done_bytes, total_bytes, label)

        found = resolve(model.name, cache_dir(), offline=model.offline, source=model.source, progress=told)
        if found.path is None or found.kind != "folder":
            raise OptionError(f"--engine vllm takes no GGUF file, which {model.name} is.", hint=hint)
        run = model.options
        options = VllmOptions(found.spec, found.path, run.context_len, run.dtype, choice.in_force, choice.vllm_arg)
        judge = VllmJudge(VllmEngine(options), limits)
        judge.start()
        return judge
