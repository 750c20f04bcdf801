"""Running prompts in several modes side by side, so that what is compared was measured in the same minutes.

Interleaved (A B A B), warm, each generation a line of records.jsonl as soon as it is there. An interrupted run goes on
where it stopped. Times are taken first; both models' opinions of the texts afterwards, so that nobody's time pays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from skydraft.decoding.generation import Generation
from skydraft.errors import EngineError, RecordsError
from skydraft.evaluation.modes import Mode
from skydraft.evaluation.records import (
    GenerationLine,
    PromptEntry,
    RunLine,
    ScoreLine,
    drop_cut_line,
    keys,
    read_records,
    round_entry,
    write_line,
)
from skydraft.types import FinishReason, Origin

RECORDS = "records.jsonl"
# What a run must have in common with the one that it goes on with, besides the models.
_SAME = ("modes", "repetitions", "workload_sha256", "prompts", "links", "link_prompts", "link_kbps", "execution",
         "share_audio", "calibration", "engine_options", "peer", "machine")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trial:
    """One generation to be made."""

    prompt: PromptEntry
    mode: Mode
    repetition: int
    link_ms: float | None

    @property
    def key(self) -> tuple[str, str, int, float | None]:
        """What tells it from the others, as in `records.keys`."""
        return self.prompt.id, self.mode.name, self.repetition, self.link_ms


@dataclass(frozen=True, slots=True)
class PeerText:
    """What a peer wrote."""

    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    finish: FinishReason
    num_prompt_tokens: int


Start = Callable[[Trial], Generation]
Ask = Callable[[Trial], PeerText]
Score = Callable[[PromptEntry, Mode, tuple[int, ...]], ScoreLine]
Done = Callable[[], None]


def trials(run: RunLine) -> Iterator[Trial]:
    """All generations of a run, interleaved. Emulated links carry what uses a link, for the first prompts only."""
    for repetition in range(run.repetitions):
        for number, prompt in enumerate(run.prompts):
            for link_ms in run.links:
                for mode in run.modes:
                    if link_ms is None or (mode.uses_link and number < run.link_prompts):
                        yield Trial(prompt, mode, repetition, link_ms)


def measure(trial: Trial, start: Start) -> GenerationLine:
    """Run one generation to its end. The clock runs from before its start to its last token."""
    began = time.perf_counter()
    with start(trial) as generation:
        rounds = list(generation.rounds())
        wall_ms = (time.perf_counter() - began) * 1e3
    if generation.finish_reason is None:
        raise EngineError("A generation ended without saying why.")
    return GenerationLine(
        prompt=trial.prompt.id,
        mode=trial.mode.name,
        repetition=trial.repetition,
        link_ms=trial.link_ms,
        finish=generation.finish_reason,
        num_prompt_tokens=generation.num_prompt_tokens,
        wall_ms=wall_ms,
        token_ids=generation.token_ids,
        origins=generation.origins,
        pieces=tuple(token.text for _, tokens in rounds for token in tokens),
        rounds=tuple(round_entry(done) for done, _ in rounds),
    )


def measure_peer(trial: Trial, ask: Ask) -> GenerationLine:
    """Run one generation of a peer, of which only tokens and time are known."""
    began = time.perf_counter()
    said = ask(trial)
    alone: list[Origin] = ["cloud"] * len(said.token_ids)
    return GenerationLine(
        prompt=trial.prompt.id,
        mode=trial.mode.name,
        repetition=trial.repetition,
        link_ms=None,
        finish=said.finish,
        num_prompt_tokens=said.num_prompt_tokens,
        wall_ms=(time.perf_counter() - began) * 1e3,
        token_ids=said.token_ids,
        origins=tuple(alone),
        pieces=said.pieces,
        rounds=(),
    )


class Comparison:
    """A run that writes to `folder`, or goes on with one that is there. Raises RecordsError if that is another run."""

    def __init__(self, folder: Path, run: RunLine) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / RECORDS
        if self.path.exists() and self.path.stat().st_size:
            before = read_records(self.path)
            _check_same(self.path, before.run, run)
            drop_cut_line(self.path)  # only now: a file that is not ours is left as it is
            self._run, done = before.run, keys(before.generations)
        else:
            self._run, done = run, set()
            with self.path.open("w", encoding="utf-8") as file:
                write_line(file, run)
        self.todo = [trial for trial in trials(self._run) if trial.key not in done]
        self.num_done = len(done)

    def generate(self, start: Start, ask: Ask, done: Done) -> None:
        """Make what is still to be made; `done` is called after each generation.

        Each mode runs once before, unmeasured, so that nobody pays for the first touch of memory.
        """
        warmed: set[tuple[str, float | None]] = set()
        with self.path.open("a", encoding="utf-8") as file:
            for trial in self.todo:
                if (kind := (trial.mode.name, trial.link_ms)) not in warmed:
                    warmed.add(kind)
                    _measured(trial, start, ask)
                write_line(file, _measured(trial, start, ask))
                done()

    def unscored(self) -> list[tuple[PromptEntry, Mode, tuple[int, ...]]]:
        """Texts without a score, each once, those of a prompt and style together."""
        records = read_records(self.path)
        scored = {(line.prompt, line.style, line.token_ids) for line in records.scores}
        prompts = {prompt.id: prompt for prompt in records.run.prompts}
        modes = {mode.name: mode for mode in records.run.modes}
        found: dict[tuple[str, str | None, tuple[int, ...]], Mode] = {}
        for line in records.generations:
            mode = modes[line.mode]
            found.setdefault((line.prompt, mode.style, line.token_ids), mode)
        order = sorted(found, key=lambda key: (key[0], key[1] or "", key[2]))
        return [(prompts[key[0]], found[key], key[2]) for key in order if key not in scored and key[2]]

    def score(self, score: Score, done: Done) -> None:
        """Have every text judged that was not."""
        todo = self.unscored()
        with self.path.open("a", encoding="utf-8") as file:
            for prompt, mode, token_ids in todo:
                write_line(file, score(prompt, mode, token_ids))
                done()


def _measured(trial: Trial, start: Start, ask: Ask) -> GenerationLine:
    return measure_peer(trial, ask) if trial.mode.peer else measure(trial, start)


def _check_same(path: Path, before: RunLine, now: RunLine) -> None:
    """Raise RecordsError unless a run can be gone on with."""
    differs = [name for name in _SAME if getattr(before, name) != getattr(now, name)]
    sides = ((side, getattr(before, side).fingerprint, getattr(now, side).fingerprint) for side in ("draft", "target"))
    differs += [f"{side} model" for side, old, new in sides if old != new]
    if differs:
        raise RecordsError(
            f"{path} holds another run: its {differs[0].replace('_', ' ')} differs.",
            hint="Give another --out, or remove the file.",
        )
