"""Run prompts in several modes, interleaved (A B A B), so that compared times come from the same minutes.

Each mode is warmed up first. Each finished generation is written to records.jsonl at once, so an interrupted run
continues where it stopped. Texts are judged and scored after all runs, outside the measured times.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from pydantic import BaseModel

from skydraft.decoding.generation import Generation
from skydraft.errors import OptionError, RecordsError, telling
from skydraft.files import lock_file
from skydraft.lab.evaluation.modes import Mode
from skydraft.lab.evaluation.records import (
    GenerationLine,
    PromptEntry,
    RunLine,
    Texts,
    VerdictLine,
    drop_cut_line,
    keys,
    read_records,
    round_entry,
    write_line,
)

RECORDS = "records.jsonl"
# Fields that must be equal, besides the models, to continue an earlier run.
_SAME = ("modes", "repetitions", "workload_sha256", "prompts", "emulated_rtt_ms", "execution", "think",
         "share_audio", "calibration", "engine_options", "machine")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trial:
    prompt: PromptEntry
    mode: Mode
    repetition: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.prompt.id, self.mode.name, self.repetition


Start = Callable[[Trial], Generation]
Done = Callable[[], None]


def trials(run: RunLine) -> Iterator[Trial]:
    """Yield all generations of a run, interleaved."""
    for repetition, prompt, mode in product(range(run.repetitions), run.prompts, run.modes):
        yield Trial(prompt, mode, repetition)


def measure(trial: Trial, start: Start) -> GenerationLine:
    """Run one generation to its end. The time is from before its start to its last token."""
    began = time.perf_counter()
    with start(trial) as generation:
        rounds = list(generation.rounds())
        wall_ms = (time.perf_counter() - began) * 1e3
    assert generation.finish_reason is not None
    return GenerationLine(
        prompt=trial.prompt.id, mode=trial.mode.name, repetition=trial.repetition,
        finish=generation.finish_reason, num_prompt_tokens=generation.num_prompt_tokens, wall_ms=wall_ms,
        token_ids=generation.token_ids, origins=generation.origins,
        pieces=tuple(token.text for _, tokens in rounds for token in tokens),
        rounds=tuple(round_entry(done) for done, _ in rounds),
    )  # fmt: skip


def alone_in(folder: Path) -> AbstractContextManager[object]:
    """Lock `folder`, at most until the process ends. Make it if it is missing. Raises OptionError if another process
    holds the lock, or the folder cannot be written."""
    hint = "Give another --out, or wait until that one is done."
    busy = OptionError(f"Another comparison is writing to {folder}.", hint=hint)
    with telling(OptionError, f"--out {folder} cannot be written", "Choose another folder."):
        return lock_file(folder / ".lock", busy)


class Comparison:
    """A run that writes to `folder`, or continues the run there. Raises RecordsError if `folder` has answers of a
    different run."""

    def __init__(self, folder: Path, run: RunLine) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / RECORDS
        before = read_records(self.path) if self.path.exists() and self.path.stat().st_size else None
        differs = _difference(before.run, run) if before else ""
        if before and differs and before.generations:
            says = f"{self.path} holds another run: not the same {differs}."
            raise RecordsError(says, hint="Give another --out, or remove the file.")
        if before and not differs:
            drop_cut_line(self.path)  # not earlier, so that another run's file stays unchanged
            self._run, done = before.run, keys(before.generations)
        else:
            self._run, done, whole = run, set(), self.path.with_suffix(".new")
            with whole.open("w", encoding="utf-8", newline="") as file:
                write_line(file, run)
            os.replace(whole, self.path)
        self.todo = [trial for trial in trials(self._run) if trial.key not in done]
        self.num_done = len(done)

    def append(self, lines: Iterable[BaseModel], counting: AbstractContextManager[Done]) -> None:
        """Write each line as soon as it is made. `counting` yields a function that is called after each."""
        with counting as done, self.path.open("a", encoding="utf-8", newline="") as file:
            for line in lines:
                write_line(file, line)
                done()

    def generations(self, start: Start) -> Iterator[GenerationLine]:
        """Run the missing trials. Before a mode's first one, run it once unmeasured, to warm up memory."""
        warmed: set[str] = set()
        for trial in self.todo:
            if trial.mode.name not in warmed:
                warmed.add(trial.mode.name)
                measure(trial, start)
            yield measure(trial, start)

    def unscored(self) -> list[tuple[PromptEntry, Mode, tuple[int, ...]]]:
        """Return the texts without a score, each once, grouped by prompt and style."""
        records = read_records(self.path)
        scored = {(line.prompt, line.style, line.token_ids) for line in records.scores}
        prompts = {prompt.id: prompt for prompt in records.run.prompts}
        modes = {mode.name: mode for mode in records.run.modes}
        found = [(line, modes[line.mode]) for line in reversed(records.generations)]  # the first mode of a text counts
        texts = {(line.prompt, mode.style, line.token_ids): mode for line, mode in found}
        order = sorted(texts, key=lambda key: (key[0], key[1] or "", key[2]))
        return [(prompts[key[0]], texts[key], key[2]) for key in order if key not in scored and key[2]]

    def verdicts(self, texts: Texts) -> Iterator[VerdictLine]:
        tasks = {prompt.id: prompt.task for prompt in self._run.prompts}
        for (prompt, token_ids), text in texts.items():
            if task := tasks[prompt]:
                yield VerdictLine(prompt=prompt, token_ids=token_ids, **asdict(task.check.judge(text)))


def _difference(before: RunLine, now: RunLine) -> str:
    """Return the name of the first difference, or ""."""
    differs = [name.replace("_", " ") for name in _SAME if getattr(before, name) != getattr(now, name)]
    sides = ((side, getattr(before, side).fingerprint, getattr(now, side).fingerprint) for side in ("draft", "target"))
    differs += [f"{side} model" for side, old, new in sides if old != new]
    return next(iter(differs), "")
