"""Gates: which blocks go to the target. A question about a block in its context, and for most a pure one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from skydraft.characters import punctuation_density
from skydraft.decoding.context import Context
from skydraft.decoding.loops import unverified_loop
from skydraft.engines.vocab import Vocab
from skydraft.errors import OptionError
from skydraft.types import DraftBlock, Round, Signals

Reason = Literal["always", "uncertain", "density", "loop", "content", ""]
MAX_DENSITY = 0.4

_UNSURE: dict[str, Callable[[Signals, float], bool]] = {
    "entropy": lambda signals, theta: signals.entropy > theta,
    "margin": lambda signals, least: signals.margin < least,
    "prob": lambda signals, least: signals.top_prob < least,
}
_LIMITS = {
    "entropy": (0.0, float("inf"), "nats"),
    "margin": (0.0, 1.0, "a probability"),
    "prob": (0.0, 1.0, "a probability"),
    "calibrated": (0.0, 1.0, "an agreement"),
}
_EXAMPLES = {"entropy": "3.25", "margin": "0.3", "prob": "0.3", "calibrated": "0.95"}
_CONTENT_RULES: dict[str, re.Pattern[str]] = {
    "digits": re.compile(r"\d"),
    "dates": re.compile(
        r"[\d一二三四五六七八九十]\s*[年月日号]|\d\s*[/-]\s*\d|\d{4}\.\d|(?:星期|周)[一二三四五六日天末]"
    ),
}
_LOOKBACK = 8  # tokens; longer than anything a content rule matches


class GatePolicy(Protocol):
    """Decides about the blocks of one generation, and may learn from its rounds."""

    @property
    def kind(self) -> str:
        """always, never, the signal it looks at, or calibrated."""

    @property
    def needs_signals(self) -> bool:
        """Whether the draft model's uncertainty has to be measured for it."""

    def is_unsure(self, signals: Sequence[Signals]) -> bool:
        """Whether a block of tokens with these signals passes the gate."""

    def reason(self, context: Context, block: DraftBlock, vocab: Vocab) -> Reason:
        """Why the block has to be escalated, or "" to skip it."""

    def observe(self, done: Round) -> None:
        """Take in a committed round."""


@dataclass(frozen=True, slots=True)
class Gate:
    """`always`, `never`, or a signal with a threshold; and the content rules added to it.

    A gate of the kind `calibrated` only states the agreement wanted; `CalibratedGate` decides by it.
    """

    kind: str
    threshold: float = 0.0
    content_rules: tuple[str, ...] = ()

    @property
    def needs_signals(self) -> bool:
        """Whether the draft model's uncertainty has to be measured for this gate."""
        return self.kind in _LIMITS

    def is_unsure(self, signals: Sequence[Signals]) -> bool:
        """Whether one of the tokens passes the gate."""
        return self.kind in _UNSURE and any(_UNSURE[self.kind](token, self.threshold) for token in signals)

    def observe(self, done: Round) -> None:
        """What happened changes nothing here."""

    def reason(self, context: Context, block: DraftBlock, vocab: Vocab) -> Reason:
        """Why the block has to be escalated, or "" to skip it. `never` means never, whatever the text.

        A round that drafted nothing is the target's.
        """
        if self.kind == "always" or not block.token_ids:
            return "always"
        if self.kind == "never":
            return ""
        return "uncertain" if self.is_unsure(block.signals) else self.text_reason(context, block, vocab)

    def text_reason(self, context: Context, block: DraftBlock, vocab: Vocab) -> Reason:
        """What the text of a block says against skipping it, however sure it was."""
        text = vocab.decode(block.token_ids)
        if punctuation_density(text) > MAX_DENSITY:
            return "density"
        token_ids = np.append(context.token_ids, np.array(block.token_ids, np.int32))
        if unverified_loop(token_ids, context.prompt_len, block.base, context.seen_len):
            return "loop"
        return "content" if self._matches_content(context, text, vocab) else ""

    def _matches_content(self, context: Context, text: str, vocab: Vocab) -> bool:
        """Whether a content rule matches text that reaches into the block, perhaps from before it."""
        if not self.content_rules:
            return False
        before = vocab.decode(context.token_ids[context.prompt_len :][-_LOOKBACK:])
        found = (match for rule in self.content_rules for match in _CONTENT_RULES[rule].finditer(before + text))
        return any(match.end() > len(before) for match in found)


def parse_gate(text: str) -> Gate:
    """`always`, `never`, `entropy:THETA`, `margin:M`, `prob:P` or `calibrated:AGREEMENT`; +digits, +dates at will."""
    main, *rules = text.split("+")
    if unknown := [rule for rule in rules if rule not in _CONTENT_RULES]:
        raise OptionError(f"There is no content rule '{unknown[0]}'.", hint=f"Known: {', '.join(_CONTENT_RULES)}.")
    kind, _, value = main.partition(":")
    if kind in ("always", "never") and not value:
        if rules:
            raise OptionError(f"The gate {kind} leaves nothing for the rule {rules[0]} to decide.")
        return Gate(kind)
    if kind not in _LIMITS:
        raise OptionError(
            f"There is no gate '{text}'.",
            hint="Use always, never, entropy:THETA, margin:M, prob:P or calibrated:AGREEMENT.",
        )
    return Gate(kind, _parse_threshold(kind, value), tuple(rules))


def _parse_threshold(kind: str, value: str) -> float:
    low, high, unit = _LIMITS[kind]
    try:
        threshold = float(value)
    except ValueError:
        threshold = -1.0
    if not low <= threshold <= high:  # also refuses NaN
        upper = "" if high == float("inf") else f" and at most {high:g}"
        raise OptionError(
            f"The threshold of the gate {kind} must be {unit}, at least {low:g}{upper}, not '{value}'.",
            hint=f"For example {kind}:{_EXAMPLES[kind]}.",
        )
    return threshold
