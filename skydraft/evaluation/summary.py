"""From records to figures: for each mode and link the measures with intervals, all from the same prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from skydraft.decoding.cost_model import expected_tokens, measured_alpha
from skydraft.decoding.stats import percentile, token_gaps
from skydraft.evaluation import references
from skydraft.evaluation.bootstrap import LEVEL, NUM_RESAMPLES, Floats, Resamples
from skydraft.evaluation.measures import BY_NAME, MEASURES, Case, Measure
from skydraft.evaluation.modes import Mode
from skydraft.evaluation.records import GenerationLine, PromptEntry, Records, ScoreLine
from skydraft.evaluation.text_indicators import indicators

SCHEMA = 2


@dataclass(frozen=True)
class Setting:
    """One mode over one link (None: in process), with its generations by prompt: [num_prompts][repetitions]."""

    mode: Mode
    link_ms: float | None
    cases: tuple[tuple[Case, ...], ...]

    @property
    def name(self) -> str:
        """As shown: the mode, and the round trip if there is one."""
        return self.mode.name if self.link_ms is None else f"{self.mode.name} @ {self.link_ms:g} ms"

    @property
    def all_cases(self) -> list[Case]:
        """Every generation."""
        return [case for per_prompt in self.cases for case in per_prompt]

    def sums(self, measure: Measure) -> tuple[Floats, Floats]:
        """What each prompt adds above and below the line, [num_prompts] each."""
        counted = [[measure.count(case) for case in per_prompt] for per_prompt in self.cases]
        return tuple(np.array([sum(pair[side] for pair in pairs) for pairs in counted], float) for side in (0, 1))  # type: ignore[return-value]  # two sides

    def value(self, name: str) -> float | None:
        """A measure over all prompts; None where there is nothing to divide by."""
        above, below = self.sums(BY_NAME[name])
        return float(above.sum() / below.sum()) if below.sum() else None

    @cached_property
    def whole_blocks(self) -> tuple[int, list[int]]:
        """(k, accepted drafts of each escalated block of that length), blocks cut short by an end left out."""
        verified = [
            record for case in self.all_cases for record in case.generation.records if record.outcome == "verified"
        ]
        k = max((record.num_draft for record in verified), default=0)
        whole = [record for record in verified if record.num_draft == k and record.num_committed > record.num_accepted]
        return k, [record.num_accepted for record in whole]


class Findings:
    """Records sorted into settings. Prompts that an interrupted run has not in every mode are left out."""

    def __init__(self, records: Records) -> None:
        self.run = records.run
        self._scores = {(line.prompt, line.style, line.token_ids): line for line in records.scores}
        self.modes = self.run.modes
        self._by_key: dict[tuple[str, str, float | None], list[GenerationLine]] = defaultdict(list)
        for line in records.generations:
            self._by_key[line.mode, line.prompt, line.link_ms].append(line)
        self.settings = tuple(self._settings())
        self.score_lines = records.scores

    def _settings(self) -> list[Setting]:
        found = []
        for link_ms in self.run.links:
            modes = [mode for mode in self.modes if link_ms is None or mode.uses_link]
            prompts = [prompt for prompt in self.run.prompts if all(self._lines(m, prompt, link_ms) for m in modes)]
            if prompts:
                for mode in modes:
                    cases = tuple(
                        tuple(self._case(mode, prompt, line) for line in self._lines(mode, prompt, link_ms))
                        for prompt in prompts
                    )
                    found.append(Setting(mode, link_ms, cases))
        return found

    def _lines(self, mode: Mode, prompt: PromptEntry, link_ms: float | None) -> list[GenerationLine]:
        return self._by_key[mode.name, prompt.id, link_ms]

    def _case(self, mode: Mode, prompt: PromptEntry, line: GenerationLine) -> Case:
        alone = next((self._by_key[name, prompt.id, None] for name in self._alone(mode.style)), [])
        return Case(
            line,
            self.score(line, mode),
            indicators(line.text, np.array(line.token_ids, np.int32)),
            alone[0].token_ids if alone else None,
            references.rouge_l(line.text, prompt.references) if prompt.references else None,
        )

    def _alone(self, style: str | None) -> list[str]:
        """Names of the modes in which the target works alone under this style."""
        return [mode.name for mode in self.modes if mode.is_target_alone and mode.style == style]

    def score(self, line: GenerationLine, mode: Mode) -> ScoreLine | None:
        """What the models think of the text of a generation, if it was scored."""
        return self._scores.get((line.prompt, mode.style, line.token_ids))

    def setting(self, name: str, link_ms: float | None = None) -> Setting | None:
        """The setting of a mode, if it was run."""
        return next((s for s in self.settings if s.mode.name == name and s.link_ms == link_ms), None)


def summarize(findings: Findings) -> dict[str, Any]:
    """What summary.json holds. Intervals: paired bootstrap over prompts."""
    by_link: dict[float | None, Resamples] = {}
    shown = []
    for setting in findings.settings:
        if setting.link_ms not in by_link:
            by_link[setting.link_ms] = Resamples(len(setting.cases))
        shown.append(_setting(findings, setting, by_link[setting.link_ms]))
    run = findings.run
    return {
        "schema": SCHEMA,
        "run": run.model_dump(mode="json", by_alias=True, exclude={"prompts"}) | {"num_prompts": len(run.prompts)},
        "bootstrap": {"resamples": NUM_RESAMPLES, "level": LEVEL, "unit": "prompt"},
        "settings": shown,
    }


def _setting(findings: Findings, setting: Setting, resamples: Resamples) -> dict[str, Any]:
    found = {measure.name: _figure(setting, measure, resamples) for measure in MEASURES}
    gaps = [gap for case in setting.all_cases for gap in token_gaps(case.generation.records)]
    densities = [case.indicators.punctuation_density for case in setting.all_cases]
    return {
        "mode": setting.mode.name,
        "link_ms": setting.link_ms,
        "num_prompts": len(setting.cases),
        "num_generations": len(setting.all_cases),
        "num_tokens": sum(case.num_tokens for case in setting.all_cases),
        "measures": {name: figure for name, figure in found.items() if figure is not None},
        "speed_over": _speed_ratios(findings, setting, resamples),
        "itl_ms_p50": percentile(gaps, 50),
        "itl_ms_p95": percentile(gaps, 95),
        "punctuation_density_median": percentile(densities, 50),
        "punctuation_density_max": round(max(densities), 4),
        "finish": _counts([case.generation.finish for case in setting.all_cases]),
        "acceptance": _acceptance(setting),
        "categories": _by_category(findings, setting),
        "references": references.corpus(
            [(case.generation.text, _references(findings, case)) for case in setting.all_cases]
        ),
    }


def _by_category(findings: Findings, setting: Setting) -> dict[str, dict[str, float | None]]:
    """Agreement and calls by category of the prompts, those without one apart. No intervals: they are few."""
    by_prompt = {prompt.id: prompt.category for prompt in findings.run.prompts}
    sorted_cases: dict[str, list[tuple[Case, ...]]] = defaultdict(list)
    for cases in setting.cases:
        if category := by_prompt[cases[0].generation.prompt]:
            sorted_cases[category].append(cases)
    found: dict[str, dict[str, float | None]] = {}
    for category, members in sorted(sorted_cases.items()):
        part = Setting(setting.mode, setting.link_ms, tuple(members))
        values = {name: part.value(name) for name in ("target_agreement", "cloud_calls_per_token")}
        rounded = {name: None if value is None else _rounded(value) for name, value in values.items()}
        found[category] = {"num_prompts": len(members), **rounded}
    return found


def _references(findings: Findings, case: Case) -> tuple[str, ...]:
    return next(prompt.references for prompt in findings.run.prompts if prompt.id == case.generation.prompt)


def _figure(setting: Setting, measure: Measure, resamples: Resamples) -> dict[str, float] | None:
    above, below = setting.sums(measure)
    if not below.sum() or (interval := resamples.ratio(above, below)) is None:
        return None
    return {"value": _rounded(above.sum() / below.sum()), "low": _rounded(interval[0]), "high": _rounded(interval[1])}


def _speed_ratios(findings: Findings, setting: Setting, resamples: Resamples) -> dict[str, dict[str, float]]:
    """Tokens/s in units of the other baselines on the same link, in pairs over the same prompts."""
    ratios = {}
    for name in ("cloud", "edge", "hf-target"):
        other = findings.setting(name, setting.link_ms)
        if other is None or len(other.cases) != len(setting.cases):
            continue
        ours, theirs = setting.sums(BY_NAME["tokens_per_s"]), other.sums(BY_NAME["tokens_per_s"])
        interval = resamples.ratio_of_ratios(ours, theirs)
        if interval:
            value = (ours[0].sum() / ours[1].sum()) / (theirs[0].sum() / theirs[1].sum())
            ratios[name] = {"value": _rounded(value), "low": _rounded(interval[0]), "high": _rounded(interval[1])}
    return ratios


def _acceptance(setting: Setting) -> dict[str, Any] | None:
    """Acceptance by position beside what a constant acceptance would give, over whole escalated blocks."""
    k, accepted = setting.whole_blocks
    alpha = measured_alpha((num, k) for num in accepted)
    if not k or alpha is None:
        return None
    always = setting.mode.plan is not None and setting.mode.plan.gate.kind == "always"
    per_round = sum(accepted) / len(accepted) + 1
    return {
        "k": k,
        "num_blocks": len(accepted),
        "alpha": _rounded(alpha),
        "by_position": [_rounded(sum(n >= i for n in accepted) / len(accepted)) for i in range(1, k + 1)],
        "theory": [_rounded(alpha**n) for n in range(1, k + 1)],
        "rounds_per_token": _rounded(1 / per_round) if always else None,
        "rounds_per_token_theory": _rounded(1 / expected_tokens(alpha, k)) if always else None,
    }


def _counts(values: Sequence[str]) -> dict[str, int]:
    return {value: values.count(value) for value in sorted(set(values))}


def _rounded(value: float) -> float:
    return round(float(value), 5)
