"""Repetition in the text: a cycle of 1 to 8 tokens, seen over history and block at any block boundary (F6).

A confident model repeats itself with low entropy, so no gate on uncertainty sees it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

MAX_PERIOD = 8
MAX_DISTINCT = 4  # a longer phrase said twice is an echo; cycles seen in practice have up to four tokens
_MIN_RUN_OF_ONE = 4


def unverified_cycles(generated: Seq[int], base: int, num_seen: int) -> list[int]:
    """Lengths at which `generated` came to hold a cycle that reaches into generated[base:], unjudged by the target.

    It counts as a cycle from its second copy on, a single token from four in a row. One that was already complete at
    `num_seen`, the length that the target knows, is the target's own choice: it forces nothing again.
    """
    return [
        length
        for period in range(1, MAX_PERIOD + 1)
        for length in _lengths(generated, period, base)
        if length > max(base, num_seen)
    ]


def _lengths(generated: Seq[int], period: int, base: int) -> list[int]:
    """Lengths at which a run became a cycle of that period, for the runs that reach into generated[base:]."""
    needed = _MIN_RUN_OF_ONE - 1 if period == 1 else period
    lengths, run = [], 0
    start = max(period, base - 2 * MAX_PERIOD - needed)
    while start > period and generated[start - 1] == generated[start - 1 - period]:
        start -= 1  # a run that began long before the block became a cycle back there
    for index in range(start, len(generated)):
        run = run + 1 if generated[index] == generated[index - period] else 0
        if run == needed and _is_primitive(generated[index + 1 - period : index + 1]):
            lengths.append(index + 1)
    return lengths


def _is_primitive(phrase: Seq[int]) -> bool:
    """Whether the phrase has few distinct tokens and is no repetition of a shorter one, which is counted as such."""
    period = len(phrase)
    shorter = (part for part in range(1, period) if period % part == 0)
    return len(set(phrase)) <= MAX_DISTINCT and not any(phrase[part:] == phrase[:-part] for part in shorter)


def num_cycles(generated: Seq[int]) -> int:
    """How many cycles a whole text holds: places where a run became one."""
    return sum(len(_lengths(generated, period, 0)) for period in range(1, MAX_PERIOD + 1))
