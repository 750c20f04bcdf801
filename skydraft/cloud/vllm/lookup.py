"""A guess of the next tokens from the text itself: the last tokens stood before, and something followed them.

Prompt lookup decoding (A. Saxena, 2023). It needs no model, and the target judges every guess.
"""

from __future__ import annotations

import numpy as np

from skydraft.engines.vocab import TokenIds

_LONGEST, _SHORTEST = 3, 2  # matching tokens; a single one is too often a coincidence
_NUM_GUESSED = 8
_LOOK_BACK = 4096


def look_up(token_ids: TokenIds) -> tuple[int, ...]:
    """The 8 tokens that followed the latest earlier place with the same last 3 tokens, or else 2; or none."""
    recent = token_ids[-_LOOK_BACK:]
    for size in range(_LONGEST, _SHORTEST - 1, -1):
        if len(recent) <= size:
            continue
        windows = np.lib.stride_tricks.sliding_window_view(recent[:-1], size)  # [len - size, size]
        starts = np.flatnonzero((windows == recent[-size:]).all(axis=1))
        if len(starts):
            text = [int(each) for each in recent]
            ahead = len(text) - (int(starts[-1]) + size)  # the distance back to the tokens that followed
            for _ in range(_NUM_GUESSED):
                text.append(text[-ahead])  # past the end the guess repeats itself
            return tuple(text[-_NUM_GUESSED:])
    return ()
