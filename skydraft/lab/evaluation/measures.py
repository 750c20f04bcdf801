"""The figures of a comparison. Each is a ratio of two sums, so that intervals can come from resampled prompts.

Each measure has its definition, which the report prints.
"""

from collections.abc import Callable
from dataclasses import dataclass

from skydraft.characters import content_units, is_cjk, is_punctuation, num_adjacent
from skydraft.decoding.accounts.stats import token_gaps
from skydraft.lab.evaluation.records import GenerationLine, PromptEntry, ScoreLine, VerdictLine
from skydraft.types import StepRecord


@dataclass(frozen=True, slots=True)
class Case:
    """One generation with its score. `cloud_ids` are the target's own tokens for the same prompt and style, if mode
    `cloud` was run."""

    prompt: PromptEntry
    generation: GenerationLine
    score: ScoreLine | None
    cloud_ids: tuple[int, ...] | None
    verdict: VerdictLine | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.generation.token_ids)

    @property
    def verified(self) -> list[StepRecord]:
        return [record for record in self.generation.records if record.outcome == "verified"]


Fraction = tuple[float, float]  # numerator and denominator


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure. `count` returns the numerator and denominator that one generation adds."""

    name: str
    label: str
    unit: str
    convention: str
    count: Callable[[Case], Fraction] = lambda case: (0, 0)
    digits: int = 3


Field = Callable[[StepRecord], float]


def _per_token(field: Field) -> Callable[[Case], Fraction]:
    return lambda case: (sum(map(field, case.generation.records)), case.num_tokens)


def _share(part: Field, whole: Field, *, verified: bool = True) -> Callable[[Case], Fraction]:

    def count(case: Case) -> Fraction:
        records = case.verified if verified else case.generation.records
        return sum(map(part, records)), sum(map(whole, records))

    return count


def _agreement(case: Case) -> Fraction:
    if case.score is None:
        return 0, 0
    return sum(map(int.__eq__, case.score.choices, case.score.token_ids)), case.num_tokens


def _gaps(case: Case) -> Fraction:
    gaps = token_gaps(case.generation.records)
    return sum(gaps), len(gaps)


def _bytes(case: Case) -> Fraction:
    total = sum(record.link.bytes_up + record.link.bytes_down for record in case.generation.records)
    return (total, case.num_tokens) if total else (0, 0)


def _repeats(n: int) -> Callable[[Case], Fraction]:

    def count(case: Case) -> Fraction:
        units = content_units(case.generation.text)
        ngrams = [*zip(*(units[at:] for at in range(n)), strict=False)]
        return len(ngrams) - len({*ngrams}), len(ngrams)

    return count


def _adjacent(case: Case) -> Fraction:
    text = case.generation.text
    return (num_adjacent(text), len(text)) if any(map(is_cjk, text)) else (0, 0)


_NGRAMS = "n-grams of {} that occurred before in their text / all; of ideographs, else of words; punctuation is skipped"
# How the texts read.
INDICATORS = (
    Measure("punctuation_density", "punctuation", "", "punctuation characters / characters, of the decoded text",
            lambda case: (sum(map(is_punctuation, case.generation.text)), len(case.generation.text))),
    Measure("repeat_rate_2", "repeats of 2", "", _NGRAMS.format(2), _repeats(2)),
    Measure("repeat_rate_3", "repeats of 3", "", _NGRAMS.format(3), _repeats(3)),
    Measure("adjacent_repeat", "adjacent repeats", "",
            "ideographs equal to the one right before them / characters, of texts with ideographs; a pair across two "
            "words (主播播报) counts, doubles in words (慢慢, skydraft.characters.DOUBLED) do not", _adjacent, 4),
)  # fmt: skip
MEASURES = (
    Measure("target_agreement", "agreement with the target", "",
            "tokens that are the target's own greedy choice after the same text and constraints / tokens", _agreement),
    Measure("target_nll", "NLL under the target", "nats/token",
            "mean −log p of a generated token under the target, raw logits, temperature 1",
            lambda case: (sum(case.score.nll), case.num_tokens) if case.score else (0, 0)),
    Measure("task_score", "tasks right", "", "share of tasks whose answer passes its check, mean over all sets",
            lambda case: (case.verdict.score, 1) if case.verdict else (0, 0)),
    Measure("same_as_cloud", "same text as cloud", "",
            "share of generations with the tokens of mode cloud under the same prompt and style",
            lambda case: (0, 0) if case.cloud_ids is None else (case.generation.token_ids == case.cloud_ids, 1)),
    Measure("cloud_calls_per_token", "calls", "/token",
            "times that the device asked the large model and waited / generated tokens; a stream is one call",
            lambda case: (len(case.verified), case.num_tokens)),
    Measure("target_written_per_token", "written", "/token",
            "tokens that the large model wrote itself, one by one / generated tokens",
            _per_token(lambda r: r.num_written)),
    Measure("target_passes_per_token", "target passes", "/token",
            "forwards of the target after its prefill / generated tokens", _per_token(lambda r: r.target.num_passes)),
    Measure("target_rows_per_token", "target rows", "/token",
            "rows of the target after its prefill / generated tokens", _per_token(lambda r: r.target.num_rows)),
    Measure("acceptance_rate", "acceptance", "", "accepted / drafted tokens, in checked blocks only",
            _share(lambda r: r.num_accepted, lambda r: r.num_draft)),
    Measure("blocks_sent", "blocks sent", "/text", "checked rounds with a draft / texts",
            lambda case: (sum(record.num_draft > 0 for record in case.verified), 1), 2),
    Measure("mean_acceptance_length", "tokens a checked round", "",
            "tokens committed per checked round, the recovered or bonus token included",
            _share(lambda r: r.num_committed, lambda r: 1)),
    Measure("tokens_per_s", "speed", "tokens/s", "generated tokens / wall time, prefill of both sides included",
            lambda case: (1e3 * case.num_tokens, case.generation.wall_ms), 2),
    Measure("ttft_ms", "time to first token", "ms",
            "start to the first committed round, mean over generations",
            lambda case: (case.generation.records[0].ended_ms, 1) if case.generation.records else (0, 0), 0),
    Measure("itl_ms", "inter-token latency", "ms",
            "mean gap between tokens after the first round; the gap before a round is shared by its tokens", _gaps, 1),
    Measure("draft_ms_per_token", "draft model", "ms/token",
            "time inside forwards of the draft model, prefill included", _per_token(lambda r: r.draft.forward_ms), 1),
    Measure("target_ms_per_token", "target model", "ms/token", "time inside forwards of the target, prefill included",
            _per_token(lambda r: r.target.forward_ms), 1),
    Measure("overhead_ms_per_round", "overhead", "ms/round",
            "wall time of a round less model forwards, queue and wire",
            _share(lambda r: r.overhead_ms, lambda r: 1, verified=False), 2),
    Measure("bytes_per_token", "payload", "bytes/token",
            "messages of the protocol, both ways, openings included; only over a link", _bytes, 1),
    *INDICATORS,
)  # fmt: skip
BY_NAME = {measure.name: measure for measure in MEASURES}
