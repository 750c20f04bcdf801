"""records.jsonl: one line for each event, in order. A report computes all its figures from it.

The first line (`run`) describes the run. Then come `generation` lines, one per prompt, mode and repetition, `verdict`
lines if prompts are tasks, and finally `score` lines with both models' predictions. A file may be read while it is
written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

from pydantic import BaseModel, Field, TypeAdapter

from skydraft.characters import from_json, rounded
from skydraft.config import Execution
from skydraft.errors import RecordsError, naming, telling
from skydraft.files import Stored, read_file
from skydraft.lab.evaluation.modes import Mode
from skydraft.lab.tasks.checks import Task
from skydraft.prompts.thinking import Think
from skydraft.types import EndedBy, FinishReason, Origin, Round, Signals, StepRecord

_NAME_IT = "Name the folder of a comparison."


class PromptEntry(Stored):
    """A prompt. `audio` is the path of a recording."""

    id: str
    prompt: str
    category: str = ""
    audio: str | None = None
    task: Task | None = None


class ModelEntry(Stored):
    """A model. `forward_ms[n - 1]` is the probed time of a forward of n rows. For a server it is empty, and
    `invariant_rows` is 0."""

    name: str
    fingerprint: str
    invariant_rows: int
    forward_ms: tuple[float, ...]


class RunLine(Stored):
    """The settings of a run, its machine, its models and its prompts.

    `emulated_rtt_ms` is the round trip of an emulated link. `calibration` is a hash. `isolation` describes how the
    code of tasks was isolated.
    """

    kind: Literal["run"] = "run"
    schema_number: Literal[3] = Field(default=3, alias="schema")
    started: str
    machine: str
    versions: dict[str, str]
    command: str
    draft: ModelEntry
    target: ModelEntry
    vocab_fingerprint: str
    execution: Execution
    modes: tuple[Mode, ...]
    repetitions: int
    workload: str
    workload_sha256: str
    emulated_rtt_ms: float | None = None
    think: Think = "auto"
    share_audio: str | None = None
    calibration: str | None = None
    isolation: str | None = None
    engine_options: dict[str, Any] = Field(default_factory=dict)
    prompts: tuple[PromptEntry, ...]


class RoundEntry(Stored):
    """A round. `signals` has (entropy, margin, top probability) for each drafted token."""

    record: StepRecord
    ended_by: EndedBy
    draft_ids: tuple[int, ...]
    signals: tuple[tuple[float, float, float], ...]


class GenerationLine(Stored):
    """A finished text. `pieces` are its tokens' texts."""

    kind: Literal["generation"] = "generation"
    prompt: str
    mode: str
    repetition: int
    finish: FinishReason
    num_prompt_tokens: int
    wall_ms: float = Field(gt=0)
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    pieces: tuple[str, ...]
    rounds: tuple[RoundEntry, ...]

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def records(self) -> tuple[StepRecord, ...]:
        return tuple(entry.record for entry in self.rounds)

    def model_post_init(self, context: object) -> None:
        num_committed = sum(record.num_committed for record in self.records)
        _check_lengths(self.token_ids, self.origins, self.pieces, range(num_committed))


class ScoreLine(Stored):
    """Both models' predictions after each prefix of a text.

    `choices` are the target's greedy choices under the constraints of the run and `style`; `choice_pieces` are their
    texts. `nll` is each token's −log p under the target (nats, raw logits). `drafted` are the draft model's choices.
    """

    kind: Literal["score"] = "score"
    prompt: str
    style: str | None
    token_ids: tuple[int, ...]
    choices: tuple[int, ...]
    choice_pieces: tuple[str, ...]
    nll: tuple[float, ...]
    signals: tuple[tuple[float, float, float], ...]
    drafted: tuple[int, ...]

    def model_post_init(self, context: object) -> None:
        _check_lengths(self.token_ids, self.choices, self.choice_pieces, self.nll, self.signals, self.drafted)


def _check_lengths(*lists: Sized) -> None:
    if len({len(each) for each in lists}) > 1:
        raise ValueError("its lists differ in length")


class VerdictLine(Stored):
    """The verdict of a task's check on a text."""

    kind: Literal["verdict"] = "verdict"
    prompt: str
    token_ids: tuple[int, ...]
    score: float = Field(ge=0, le=1)
    answer: str
    note: str


AnyLine = RunLine | GenerationLine | ScoreLine | VerdictLine
_ADAPTER: TypeAdapter[AnyLine] = TypeAdapter(Annotated[AnyLine, Field(discriminator="kind")])


Texts = dict[tuple[str, tuple[int, ...]], str]  # by prompt and tokens


class Records(Stored):
    run: RunLine
    generations: tuple[GenerationLine, ...]
    scores: tuple[ScoreLine, ...]
    verdicts: tuple[VerdictLine, ...] = ()

    def unjudged(self) -> Texts:
        """Return the texts of tasks that have no verdict yet, each once."""
        tasks = {prompt.id for prompt in self.run.prompts if prompt.task}
        judged = {(line.prompt, line.token_ids) for line in self.verdicts}
        texts = {(line.prompt, line.token_ids): line.text for line in self.generations if line.prompt in tasks}
        return {key: text for key, text in texts.items() if key not in judged}


def round_entry(done: Round) -> RoundEntry:
    signals = tuple(signals_entry(signals) for signals in done.block.signals)
    return RoundEntry(record=done.record, ended_by=done.block.ended_by, draft_ids=done.block.token_ids, signals=signals)


def signals_entry(signals: Signals) -> tuple[float, float, float]:
    """Return (entropy, margin, top probability), rounded for the file."""
    return round(signals.entropy, 4), round(signals.margin, 5), round(signals.top_prob, 5)


def read_records(path: Path) -> Records:
    """Read all lines but an incomplete last one. Raises RecordsError."""
    lines = list(_parse(path))
    runs = [line for line in lines if isinstance(line, RunLine)]
    if len(runs) != 1 or lines[0] is not runs[0]:
        raise RecordsError(f"{path} does not begin with a line of kind run, its only one.", hint=_NAME_IT)
    generations = tuple(line for line in lines if isinstance(line, GenerationLine))
    scores = tuple(line for line in lines if isinstance(line, ScoreLine))
    verdicts = tuple(line for line in lines if isinstance(line, VerdictLine))
    records = Records(run=runs[0], generations=generations, scores=scores, verdicts=verdicts)
    _check_references(path, records)
    return records


def _parse(path: Path) -> Iterator[AnyLine]:
    with telling(RecordsError, f"{path} cannot be read", _NAME_IT):
        lines = read_file(path).split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            if line:
                yield _parse_line(path, number, line)
        except RecordsError:
            if number < len(lines):  # text after the last newline may be incomplete
                raise


def _parse_line(path: Path, number: int, line: bytes) -> AnyLine:
    hint = "Restore the file, or run the comparison again."
    with naming(RecordsError, f"Line {number} of {path} is not a valid record", hint):
        return _ADAPTER.validate_python(from_json(line))


def _check_references(path: Path, records: Records) -> None:
    prompts, modes = {prompt.id for prompt in records.run.prompts}, {mode.name for mode in records.run.modes}
    lines: Iterable[GenerationLine | ScoreLine | VerdictLine]
    lines = (*records.generations, *records.scores, *records.verdicts)
    if any(line.prompt not in prompts for line in lines) or any(line.mode not in modes for line in records.generations):
        raise RecordsError(f"{path} has a line for a prompt or a mode that its first line does not have.")
    if len(prompts) < len(records.run.prompts) or len(keys(records.generations)) < len(records.generations):
        raise RecordsError(f"{path} has a prompt or a generation twice.")


def write_line(file: TextIO, line: BaseModel) -> None:
    """Write a line. Settings keep all digits; measured values are rounded."""
    content = line.model_dump(mode="json", by_alias=True)
    if isinstance(line, GenerationLine):
        content |= {"wall_ms": round(line.wall_ms, 5), "rounds": rounded(content["rounds"], 5)}
    file.write(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n")
    file.flush()


def drop_cut_line(path: Path) -> None:
    """Drop an incomplete last line in place: rewriting the file could lose hours of work."""
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def keys(generations: Iterable[GenerationLine]) -> set[tuple[str, str, int]]:
    return {(line.prompt, line.mode, line.repetition) for line in generations}
