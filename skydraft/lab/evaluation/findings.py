"""Sort records into settings: the generations of each mode, all from the same prompts."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from skydraft.intervals import Sides
from skydraft.lab.evaluation.measures import BY_NAME, Case
from skydraft.lab.evaluation.modes import Mode
from skydraft.lab.evaluation.records import GenerationLine, PromptEntry, Records


@dataclass(frozen=True)
class Setting:
    """One mode, with its generations by prompt: [num_prompts][repetitions]."""

    mode: Mode
    cases: Sequence[tuple[Case, ...]]

    @property
    def all_cases(self) -> list[Case]:
        return [case for per_prompt in self.cases for case in per_prompt]

    def sums(self, measure: str) -> Sides:
        """Return a measure's numerators and denominators, [num_prompts] each."""
        count = BY_NAME[measure].count
        pairs = [np.array([count(case) for case in per_prompt], float).sum(0) for per_prompt in self.cases]
        above, below = np.array(pairs).T
        return above, below


# A token of a text, with the draft model's signals at its place, if known. `agrees`: the target would choose the token.
# `draft_agrees`: the target would choose the draft model's choice. `accepted`: 1 for an accepted draft, 0 if one was
# rejected here.
TOKEN_COLUMNS = ("prompt", "mode", "repetition", "index", "token_id", "text", "origin", "entropy", "margin", "top_prob",
                 "agrees", "draft_agrees", "accepted")  # fmt: skip


def token_rows(case: Case) -> Iterator[dict[str, Any]]:
    """Yield a dict of TOKEN_COLUMNS for each token."""
    line, score = case.generation, case.score
    drafted: dict[int, tuple[Any, ...]] = {}  # signals and `accepted`, by index
    for entry in line.rounds:
        record, checked = entry.record, entry.record.outcome == "verified"
        signals = entry.signals or ((None,) * 3,) * record.num_draft
        for at, place in enumerate(signals[: record.num_accepted + 1] if checked else signals):
            drafted[record.base + at] = (*place, int(at < record.num_accepted) if checked else None)
    for index, token in enumerate(zip(line.token_ids, line.pieces, line.origins, strict=True)):
        *found, accepted = drafted.get(index, (None,) * 4)
        agrees: tuple[int | None, ...] = None, None
        if score:
            found = [*score.signals[index]]
            agrees = tuple(int(each[index] == score.choices[index]) for each in (line.token_ids, score.drafted))
        row = line.prompt, line.mode, line.repetition, index, *token, *found, *agrees, accepted
        yield dict(zip(TOKEN_COLUMNS, row, strict=True))


class Findings:
    """Records sorted into settings. Prompts that an interrupted run did not answer in every mode are omitted."""

    def __init__(self, records: Records) -> None:
        self.run = records.run
        self._scores = {(line.prompt, line.style, line.token_ids): line for line in records.scores}
        self._verdicts = {(line.prompt, line.token_ids): line for line in records.verdicts}
        self._lines: dict[tuple[str, str], list[GenerationLine]] = defaultdict(list)
        for line in records.generations:
            self._lines[line.mode, line.prompt].append(line)
        self.settings = tuple(self._settings())

    def _settings(self) -> Iterator[Setting]:
        modes = self.run.modes
        prompts = [prompt for prompt in self.run.prompts if all(self._lines[mode.name, prompt.id] for mode in modes)]
        for mode in modes if prompts else ():
            yield Setting(mode, tuple(tuple(self._cases(mode, prompt)) for prompt in prompts))

    def _cases(self, mode: Mode, prompt: PromptEntry) -> Iterator[Case]:
        alone = [other.name for other in self.run.modes if not other.plan.drafts and other.style == mode.style]
        cloud = self._lines[alone[0], prompt.id] if alone else []
        for line in self._lines[mode.name, prompt.id]:
            score = self._scores.get((line.prompt, mode.style, line.token_ids))
            verdict = self._verdicts.get((line.prompt, line.token_ids))
            yield Case(prompt, line, score, cloud[0].token_ids if cloud else None, verdict)
