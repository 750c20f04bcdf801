"""Gates: which blocks go to the target. `GateSpec` is what was asked for; what decides is a `Gate`.

To add a gate on one signal, add a line to `SIGNALS`; see CONTRIBUTING.md for the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from skydraft.characters import punctuation_density
from skydraft.engines.vocab import TokenIds, Vocab
from skydraft.errors import OptionError
from skydraft.gating.repetition import unverified_cycles
from skydraft.types import DraftBlock, Round, Signals

Reason = Literal["always", "uncertain", "density", "repetition", "content", ""]
MAX_DENSITY = 0.4


@dataclass(frozen=True, slots=True)
class Threshold:
    """What the number behind a gate's name means: its unit, its highest value, and an example of it.

    `is_unsure` says whether a token is too uncertain at that threshold; None where more than one token decides.
    """

    unit: str
    highest: float
    example: str
    is_unsure: Callable[[Signals, float], bool] | None = None


SIGNALS: dict[str, Threshold] = {
    "entropy": Threshold("a number of nats", float("inf"), "3.25", lambda signals, theta: signals.entropy > theta),
    "margin": Threshold("a probability", 1.0, "0.3", lambda signals, least: signals.margin < least),
    "prob": Threshold("a probability", 1.0, "0.3", lambda signals, least: signals.top_prob < least),
    "calibrated": Threshold("an agreement", 1.0, "0.95"),
}
_CONTENT_RULES: dict[str, re.Pattern[str]] = {
    "digits": re.compile(r"\d"),
    "dates": re.compile(
        r"[\d一二三四五六七八九十]\s*[年月日号]|\d\s*[/-]\s*\d|\d{4}\.\d|(?:星期|周)[一二三四五六日天末]"
    ),
}
_LOOKBACK = 8  # tokens; longer than anything a content rule matches


@dataclass(frozen=True, slots=True)
class GateSpec:
    """`always`, `never`, or the name of a signal and a threshold; and the content rules added to it.

    Raises OptionError for a kind or rule that does not exist, a threshold out of range, and rules without effect.
    """

    kind: str
    threshold: float = 0.0
    content_rules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if unknown := [rule for rule in self.content_rules if rule not in _CONTENT_RULES]:
            raise OptionError(f"There is no content rule '{unknown[0]}'.", hint=f"Known: {', '.join(_CONTENT_RULES)}.")
        if self.kind in ("always", "never"):
            if self.content_rules:
                raise OptionError(
                    f"+{self.content_rules[0]} does not apply to the gate {self.kind}, which does not look at the text."
                )
        elif self.kind not in SIGNALS:
            raise _no_gate(self.kind)
        elif not 0 <= self.threshold <= SIGNALS[self.kind].highest:  # also refuses NaN
            raise _bad_threshold(self.kind, f"{self.threshold:g}")

    @property
    def needs_signals(self) -> bool:
        """Whether the draft model's uncertainty has to be measured for it."""
        return self.kind in SIGNALS

    def __str__(self) -> str:
        threshold = f":{self.threshold:g}" if self.needs_signals else ""
        return "+".join((self.kind + threshold, *self.content_rules))


def parse_gate(text: str) -> GateSpec:
    """`always`, `never`, or `entropy:THETA`, `margin:M`, `prob:P`, `calibrated:AGREEMENT`, and +digits, +dates."""
    main, *rules = text.split("+")
    kind, colon, value = main.partition(":")
    if kind in ("always", "never") and not colon:
        return GateSpec(kind, content_rules=tuple(rules))
    if kind not in SIGNALS:
        raise _no_gate(text)
    try:
        return GateSpec(kind, float(value), tuple(rules))
    except ValueError as error:
        raise _bad_threshold(kind, value) from error


def _no_gate(text: str) -> OptionError:
    known = ", ".join(f"{kind}:{threshold.example}" for kind, threshold in SIGNALS.items())
    return OptionError(f"There is no gate '{text}'.", hint=f"Use always, never, or for example {known}.")


def _bad_threshold(kind: str, value: str) -> OptionError:
    known = SIGNALS[kind]
    upper = "" if known.highest == float("inf") else f" and at most {known.highest:g}"
    return OptionError(
        f"The threshold of the gate {kind} must be {known.unit}, at least 0{upper}, not '{value}'.",
        hint=f"For example {kind}:{known.example}.",
    )


class History(Protocol):
    """What a gate may know of the text so far."""

    @property
    def generated(self) -> TokenIds:
        """Committed tokens, the prompt left out."""

    @property
    def num_seen(self) -> int:
        """How many of them the target knows."""


class Gate(Protocol):
    """Decides about the blocks of one generation, and may learn from its rounds."""

    def is_unsure(self, signals: Sequence[Signals]) -> bool:
        """Whether a block of tokens with these signals is too uncertain to be skipped."""

    def reason(self, history: History, block: DraftBlock, vocab: Vocab) -> Reason:
        """Why the block has to be escalated, or "" to skip it."""

    def observe(self, done: Round) -> None:
        """Take in a committed round."""


class ThresholdGate:
    """A spec that decides by itself: `always`, `never`, or by the least certain token; it learns nothing."""

    def __init__(self, spec: GateSpec) -> None:
        self._spec = spec
        signal = SIGNALS.get(spec.kind)
        self._is_unsure = signal.is_unsure if signal else None

    def is_unsure(self, signals: Sequence[Signals]) -> bool:
        """Whether one of the tokens is."""
        is_unsure, threshold = self._is_unsure, self._spec.threshold
        return is_unsure is not None and any(is_unsure(token, threshold) for token in signals)

    def reason(self, history: History, block: DraftBlock, vocab: Vocab) -> Reason:
        """Why the block has to be escalated, or "" to skip it. `never` means never, whatever the text.

        A round that drafted nothing is the target's.
        """
        if self._spec.kind == "always" or not block.token_ids:
            return "always"
        if self._spec.kind == "never":
            return ""
        return "uncertain" if self.is_unsure(block.free_signals) else text_reason(self._spec, history, block, vocab)

    def observe(self, done: Round) -> None:
        """What happened changes nothing here."""


def text_reason(spec: GateSpec, history: History, block: DraftBlock, vocab: Vocab) -> Reason:
    """What the text of a block says against skipping it, however certain it was.

    What a grammar forced says nothing: the target has no other choice there. Where there is a grammar, much of the
    punctuation is its own, and no sign of a text that fell apart.
    """
    if block.forced and all(block.forced):
        return ""
    if not block.forced and punctuation_density(vocab.decode(block.token_ids)) > MAX_DENSITY:
        return "density"
    generated = [*history.generated.tolist(), *block.token_ids]
    ends = unverified_cycles(generated, block.base, history.num_seen)
    if any(not block.is_forced(end - 1 - block.base) for end in ends):
        return "repetition"
    return "content" if _matches_content(spec, history, block, vocab) else ""


def _matches_content(spec: GateSpec, history: History, block: DraftBlock, vocab: Vocab) -> bool:
    """Whether a content rule matches text that reaches into the block, perhaps from before it, and was not forced."""
    if not spec.content_rules:
        return False
    before = vocab.decode(history.generated[-_LOOKBACK:])
    text = before + vocab.decode(block.token_ids)
    found = [match for rule in spec.content_rules for match in _CONTENT_RULES[rule].finditer(text)]
    # Where each token of the block ends in the text; half a character counts as one.
    ends = [len(before) + len(vocab.decode(block.token_ids[: index + 1])) for index in range(len(block.token_ids))]
    starts = [len(before), *ends[:-1]]
    return any(
        match.start() < end and match.end() > start and not block.is_forced(index)
        for index, (start, end) in enumerate(zip(starts, ends, strict=True))
        for match in found
    )
