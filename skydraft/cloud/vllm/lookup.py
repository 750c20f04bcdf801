"""What may come next, read off a text itself: where its last words stood before, what followed them then.

Prompt lookup decoding (A. Saxena, 2023). It costs no model, and whatever it says is judged.
"""

from __future__ import annotations

import numpy as np

from skydraft.engines.vocab import TokenIds

_LONGEST, _SHORTEST = 3, 2  # tokens that have to be the same; one alone is a coincidence too often
_NUM_GUESSED = 8
_LOOK_BACK = 4096


def look_up(token_ids: TokenIds) -> tuple[int, ...]:
    """The 8 tokens that followed the latest earlier place with the same last 3 tokens, or else 2; or none."""
    recent = token_ids[-_LOOK_BACK:]
    for size in range(_LONGEST, _SHORTEST - 1, -1):
        if len(recent) <= size:
            continue
        windows = np.lib.stride_tricks.sliding_window_view(recent[:-1], size)  # [len - size, size]
        found = np.flatnonzero((windows == recent[-size:]).all(axis=1))
        if len(found):
            text = [int(each) for each in recent]
            ahead = len(text) - (int(found[-1]) + size)  # how far back lies what followed then
            for _ in range(_NUM_GUESSED):
                text.append(text[-ahead])  # past the end the text goes on as it is guessed to: in circles
            return tuple(text[-_NUM_GUESSED:])
    return ()
