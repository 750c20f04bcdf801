"""Signals measure how sure the draft model is of a token. Gates use them to decide which blocks go to the target.

`register_gate` adds your own gate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from skydraft.characters import is_punctuation
from skydraft.engines.vocab import TokenIds, Vocab
from skydraft.errors import OptionError
from skydraft.gating.allowance import Allowance
from skydraft.thinking import Place
from skydraft.types import DraftBlock, Round, Signals

Reason = Literal["always", "uncertain", "density", "repetition", "content", ""]
MAX_DENSITY, DENSITY_LEN = 0.4, 12  # share of punctuation; in at least 12 characters, so that one full stop is fine
_MARKDOWN = frozenset("*#_-`|~>")
CERTAIN = Signals(entropy=0.0, margin=1.0, top_prob=1.0)  # for the only allowed token
MAX_PERIOD = 8  # tokens of a cycle
MAX_DISTINCT = 4  # distinct tokens of a cycle: repeating a longer phrase once is normal
NUM_COPIES = 4  # of a phrase: a cycle that was seen twice
MAX_WORDLESS = 64  # tokens of a cycle without a letter, such as the zeros of a table
COPY_LEN = 20  # tokens copied word for word from earlier in the answer
_MIN_RUN_OF_ONE = 4
_NO_WEIGHT = -200.0  # exp of it is 0 in float32


def measure(row: npt.NDArray[Any]) -> Signals:
    """Measure the signals of one row of raw logits [vocab]. Entropy is in nats, in the precision of the row."""
    best = int(row.argmax())
    shifted = row - row[best]
    # Models exclude tokens by -inf. A weight that rounds to 0 does the same without a NaN.
    np.maximum(shifted, row.dtype.type(_NO_WEIGHT), out=shifted)
    weights = np.exp(shifted)
    total = float(weights.sum())
    entropy = math.log(total) - float(weights @ shifted) / total
    weights[best] = 0
    return Signals(max(entropy, 0.0), (1.0 - float(weights.max())) / total, 1.0 / total)


@dataclass(frozen=True, slots=True)
class Threshold:
    """The number after a gate's name. `is_unsure(signals, number)` tests a block; it is None for a calibrated gate."""

    unit: str
    highest: float
    example: str
    is_unsure: Callable[[Sequence[Signals], float], bool] | None = None


SIGNALS: dict[str, Threshold] = {
    "entropy": Threshold(
        "a number of nats", math.inf, "3.25", lambda block, theta: any(token.entropy > theta for token in block)
    ),
    "margin": Threshold("a probability", 1.0, "0.3", lambda block, least: any(token.margin < least for token in block)),
    "prob": Threshold("a probability", 1.0, "0.3", lambda block, least: any(token.top_prob < least for token in block)),
    "calibrated": Threshold("an agreement", 1.0, "0.95"),
}
_OUR_GATES = tuple(SIGNALS)
START = "start"  # the content rule about a block's place instead of its text
NO_PLACE = Place()  # for a text without thinking
_NUMERALS = "一二三四五六七八九十"
_CONTENT_RULES: dict[str, re.Pattern[str]] = {
    "digits": re.compile(r"\d"),
    # JSON values: strings, numbers and words after a colon, and lists; complete or begun.
    "values": re.compile(r'[:：]\s*+(?:"(?:[^"\\\n]|\\.)*+"?+|-?\d[\d.eE+-]*+|true|false|null)|\[[^\[\]{}]*+'),
    "dates": re.compile(
        rf"[\d{_NUMERALS}]\s*(?:[年月日号]|世纪)|月\s*[初廿]?[{_NUMERALS}]|初[{_NUMERALS}]|\d\s*[/-]\s*\d|\d{{4}}\.\d"
        r"|(?:星期|周)[一二三四五六日天末]|\b(?:(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
        r"|January|February|March|April|June|July|August|September|October|November|December)\b"
    ),
}
_LOOKBACK = 64  # tokens; longer than any match of a content rule, except long strings in JSON


@dataclass(frozen=True, slots=True)
class GateSpec:
    """A gate: `always`, `never`, or a signal's name and a threshold; and its content rules. Raises OptionError for an
    unknown kind or rule, a threshold out of range, and rules without effect."""

    kind: str
    threshold: float = 0.0
    content_rules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if unknown := [rule for rule in self.content_rules if rule not in (START, *_CONTENT_RULES)]:
            known = ", ".join((START, *_CONTENT_RULES))
            raise OptionError(f"There is no content rule '{unknown[0]}'.", hint=f"Use one of: {known}.")
        if self.kind in ("always", "never"):
            if self.content_rules:
                says = f"+{self.content_rules[0]} does not apply to the gate {self.kind}, which ignores the text."
                raise OptionError(says, hint="Remove it, or choose a gate such as entropy:3.25.")
        elif self.kind not in SIGNALS:
            known = ", ".join(f"{kind}:{threshold.example}" for kind, threshold in SIGNALS.items())
            raise OptionError(f"There is no gate '{self.kind}'.", hint=f"Use always, never, or for example {known}.")
        elif not 0 <= self.threshold <= SIGNALS[self.kind].highest:  # also refuses NaN
            raise _bad_threshold(self.kind, f"{self.threshold:g}")

    @property
    def needs_signals(self) -> bool:
        return self.kind in SIGNALS

    def __str__(self) -> str:
        threshold = f":{self.threshold:.15g}" if self.needs_signals else ""
        return "+".join((self.kind + threshold, *self.content_rules))


def register_gate(name: str, is_unsure: Callable[[Sequence[Signals], float], bool]) -> None:
    """Add the gate `name:THRESHOLD`. It checks a block if `is_unsure(signals of its tokens, THRESHOLD)` is true. Call
    this before you use the name; a second call replaces the function. Raises OptionError for a name that is taken or no
    identifier."""
    if name in (*_OUR_GATES, "always", "never") or not name.isidentifier():
        raise OptionError(f"A gate cannot be called '{name}'.", hint="Choose a word that no other gate has.")
    if not callable(is_unsure):
        raise OptionError(f"The gate {name} is no function.", hint="Give a function of signals and a threshold.")
    SIGNALS[name] = Threshold("a number", math.inf, "0.5", is_unsure)


def parse_gate(text: str) -> GateSpec:
    """Parse `always`, `never`, `entropy:THETA`, `margin:M`, `prob:P` or `calibrated:AGREEMENT`, and content rules."""
    main, *given = text.split("+")
    kind, _, value = main.partition(":")
    rules = tuple(dict.fromkeys(given))  # repeated rules make the same gate
    if kind not in SIGNALS:
        return GateSpec(main, content_rules=rules)
    try:
        return GateSpec(kind, float(value), rules)
    except ValueError as error:
        raise _bad_threshold(kind, value) from error


def _bad_threshold(kind: str, value: str) -> OptionError:
    known = SIGNALS[kind]
    upper = "" if known.highest == math.inf else f" and at most {known.highest:g}"
    says = f"The threshold of the gate {kind} must be {known.unit}, at least 0{upper}, not '{value}'."
    return OptionError(says, hint=f"For example {kind}:{known.example}.")


class Gate:
    """The gate of a spec. A calibrated gate tests blocks with `allowance`."""

    def __init__(self, spec: GateSpec, allowance: Allowance | None = None) -> None:
        self._spec, self._allowance = spec, allowance

    def is_unsure(self, signals: Sequence[Signals]) -> bool:
        if self._allowance:
            return self._allowance.is_unsure(signals)
        test = SIGNALS[self._spec.kind].is_unsure if self._spec.needs_signals else None
        return test is not None and bool(test(signals, self._spec.threshold))

    def observe(self, done: Round) -> None:
        """Record a committed round for the allowance. Forced tokens, blocks sent by a content rule, and fallback blocks
        do not count: they say nothing about the agreement."""
        record, is_skipped = done.record, done.record.outcome == "skipped"
        if self._allowance is None or record.reason == "content" or record.outcome == "fallback":
            return
        self._allowance.observe(record.num_committed - record.num_forced, done.block.free_signals if is_skipped else ())

    def reason(
        self, generated: TokenIds, num_seen: int, block: DraftBlock, vocab: Vocab, place: Place = NO_PLACE
    ) -> Reason:
        """Return why the block after `generated` must be escalated, or "" to skip it. The target knows `num_seen` of
        these tokens. `place` is the state of thinking after the block.

        `never` skips every block with tokens. An empty block always goes to the target.
        """
        if self._spec.kind == "always" or not block.token_ids:
            return "always"
        if self._spec.kind == "never":
            return ""
        if self.is_unsure(block.free_signals):
            return "uncertain"
        # Forced tokens are ignored. With a grammar, much punctuation is the grammar's own.
        if block.forced and all(block.forced):
            return ""
        if not block.forced and _is_dense(vocab, generated, block.token_ids):
            return "density"
        text = np.append(generated, np.array(block.token_ids, np.int32))
        ends = unverified_cycles(text.tolist(), block.base, num_seen)
        if any(not block.is_forced(end - 1 - block.base) for end in ends) or is_copying(text):
            return "repetition"
        # The beginning decides the kind of an answer, and a gate learns nothing from a text that is never checked.
        rules = self._spec.content_rules
        is_new = START in rules and place.has_ended and num_seen <= place.num_thinking
        return "content" if is_new or (rules and _matches_content(rules, generated, block, vocab)) else ""


def _is_dense(vocab: Vocab, generated: TokenIds, token_ids: Sequence[int]) -> bool:
    """Whether punctuation is dense both in a block and in the last `DENSITY_LEN` characters. Markdown marks do not
    count."""
    added = vocab.decode(token_ids)
    text = (vocab.decode(generated[-DENSITY_LEN:]) + added)[-max(len(added), DENSITY_LEN) :]
    return bool(added) and all(
        sum(is_punctuation(char) and char not in _MARKDOWN for char in part) / least > MAX_DENSITY
        for part, least in ((added, len(added)), (text, max(len(text), DENSITY_LEN)))
    )


def _matches_content(rules: Sequence[str], generated: TokenIds, block: DraftBlock, vocab: Vocab) -> bool:
    """Whether a content rule matches unforced text of the block; a match may begin before the block."""
    before = vocab.decode(generated[-_LOOKBACK:])
    text = before + vocab.decode(block.token_ids)
    matches = [match for rule in rules if rule != START for match in _CONTENT_RULES[rule].finditer(text)]
    # The end of each token in the text; half a character counts as one.
    ends = [len(before) + len(vocab.decode(block.token_ids[: index + 1])) for index in range(len(block.token_ids))]
    free = [span for index, span in enumerate(pairwise((len(before), *ends))) if not block.is_forced(index)]
    return any(match.start() < end and match.end() > start for start, end in free for match in matches)


def unverified_cycles(generated: Sequence[int], base: int, num_seen: int) -> list[int]:
    """Return the lengths at which a cycle in `generated` is complete that reaches into generated[base:].

    A model that repeats itself is confident (F6). A phrase of up to 8 tokens is a cycle from its second copy on, a
    single token from four in a row. Cycles complete at `num_seen` are the target's own choice, and left out.
    """
    return [
        end
        for end in range(max(base, num_seen) + 1, len(generated) + 1)
        for period in range(1, MAX_PERIOD + 1)
        if _ends_in_cycle(generated, end, period) and not _ends_in_cycle(generated, end - 1, period)
    ]


def _ends_in_cycle(generated: Sequence[int], end: int, period: int) -> bool:
    length = max(2 * period, _MIN_RUN_OF_ONE)
    copies = generated[max(end - length, 0) : end]
    return len(copies) == length and copies[period:] == copies[:-period] and _is_primitive(copies[-period:])


def _is_primitive(phrase: Sequence[int]) -> bool:
    period = len(phrase)
    shorter = (part for part in range(1, period) if period % part == 0)
    return len(set(phrase)) <= MAX_DISTINCT and not any(phrase[part:] == phrase[:-part] for part in shorter)


def is_looping(generated: TokenIds, vocab: Vocab) -> bool:
    """Whether the text ends in `NUM_COPIES` copies of a phrase of up to 8 tokens, or 8 of one token. A cycle without
    letters may be a table, so it must be longer."""
    tail = generated[-MAX_WORDLESS - MAX_PERIOD :]
    for period in range(1, MAX_PERIOD + 1):
        differs = np.flatnonzero(tail[period:] != tail[:-period])
        run = len(tail) - period - (int(differs[-1]) + 1 if len(differs) else 0)
        has_words = any(map(str.isalpha, vocab.decode(tail[-period:])))
        if run >= (max(NUM_COPIES * period, 2 * NUM_COPIES) - period if has_words else MAX_WORDLESS - period):
            return True
    return False


def is_copying(generated: TokenIds) -> bool:
    """Whether the last `COPY_LEN` tokens stand earlier in the text. A model in a loop as long as a paragraph is sure of
    every token. Each block of such a copy is checked, since the target may leave the loop only at the end of a
    sentence. Short cycles are left to `unverified_cycles`."""
    if len(generated) <= COPY_LEN or len(set(generated[-COPY_LEN:].tolist())) <= MAX_DISTINCT:
        return False
    before = np.lib.stride_tricks.sliding_window_view(generated[:-1], COPY_LEN)
    return bool((before == generated[-COPY_LEN:]).all(axis=1).any())
