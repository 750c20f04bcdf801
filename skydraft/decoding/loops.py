"""Loops in the text: a cycle of 1 to 8 tokens, seen over history and block at any block boundary (F6).

A confident model repeats itself with low entropy, so no gate on uncertainty sees a loop.
"""

from __future__ import annotations

from skydraft.engines.vocab import TokenIds

MAX_PERIOD = 8
MAX_DISTINCT = 4  # a longer phrase said twice is an echo; loops seen in practice have up to four tokens
_MIN_RUN_OF_ONE = 4


def unverified_loop(token_ids: TokenIds, prompt_len: int, base: int, seen_len: int) -> bool:
    """Whether the generated tokens hold a loop that ends in token_ids[base:] and that the target has not judged.

    A cycle counts as a loop from its second copy on, a single token from four in a row. A loop that was already
    complete at `seen_len`, the length that the target knows, is the target's own choice: it forces nothing again.
    """
    generated = token_ids[prompt_len:].tolist()
    block_start, judged_len = base - prompt_len, seen_len - prompt_len
    return any(
        loop_len > max(block_start, judged_len)
        for period in range(1, MAX_PERIOD + 1)
        for loop_len in _loop_lengths(generated, period, block_start)
    )


def _loop_lengths(generated: list[int], period: int, block_start: int) -> list[int]:
    """Lengths at which a run of the cycle became a loop, for the runs that reach into the block."""
    needed = _MIN_RUN_OF_ONE - 1 if period == 1 else period
    lengths, run = [], 0
    start = max(period, block_start - 2 * MAX_PERIOD - needed)
    while start > period and generated[start - 1] == generated[start - 1 - period]:
        start -= 1  # a run that began long before the block became a loop back there
    for index in range(start, len(generated)):
        run = run + 1 if generated[index] == generated[index - period] else 0
        if run == needed and _is_cycle(generated[index + 1 - period : index + 1]):
            lengths.append(index + 1)
    return lengths


def _is_cycle(phrase: list[int]) -> bool:
    """Whether the phrase has few distinct tokens and is no repetition of a shorter one, which is counted as such."""
    period = len(phrase)
    shorter = (part for part in range(1, period) if period % part == 0)
    return len(set(phrase)) <= MAX_DISTINCT and not any(phrase[part:] == phrase[:-part] for part in shorter)


def num_loops(token_ids: TokenIds) -> int:
    """How many loops a whole text holds: places where a run of a cycle became a loop."""
    generated = token_ids.tolist()
    return sum(len(_loop_lengths(generated, period, 0)) for period in range(1, MAX_PERIOD + 1))
