"""Work while waiting: while a verdict is under way, the draft model drafts what would follow the likeliest verdict.

A drafted token is a function of the text before it, so one that was drafted ahead is the one that would be drafted
later: a guess that fails costs nothing but time in which the device had nothing to do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import numpy as np

from skydraft.decoding.block_length import BlockLength
from skydraft.decoding.context import Context
from skydraft.decoding.drafting import Drafter
from skydraft.engines.vocab import TokenIds
from skydraft.errors import SkydraftError
from skydraft.gating.risk import Risk
from skydraft.types import DraftBlock

# How often the target's token is the draft model's second choice where it is not the first, and the first after a block
# that stands: guesses, not measured here, and used for the order alone.
_SECOND, _BONUS = 0.6, 0.75


class Preparer:
    """Drafts ahead for one generation, on a thread of its own, with its `drafter`. `risk` orders what is likely."""

    def __init__(self, drafter: Drafter, risk: Risk, k: int | BlockLength) -> None:
        self._drafter = drafter
        self._risk = risk
        self._k = k
        self._over = threading.Event()  # of what is under way
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drafting ahead")

    @contextmanager
    def while_waiting(self, context: Context, block: DraftBlock) -> Iterator[None]:
        """Draft what may follow `block` until the end of the `with` block, or of the step under way then."""
        self._over = over = threading.Event()
        k = self._k if isinstance(self._k, int) else self._k.longest()
        try:
            if k and block.token_ids:
                text = context.token_ids.copy()
                with suppress(RuntimeError):  # no thread to be had: nothing is lost but time
                    self._thread.submit(self._prepare, text, block, k, lambda: not over.is_set())
            yield
        finally:
            over.set()

    def _prepare(self, text: TokenIds, block: DraftBlock, k: int, may_go_on: Callable[[], bool]) -> None:
        drafter = self._drafter
        try:
            drafter.forget_prepared()
            for num_accepted in likeliest(block, self._risk):
                if not may_go_on():
                    return
                accepted = np.append(text, block.token_ids[:num_accepted]).astype(np.int32)
                if num_accepted < len(block.token_ids):
                    next_ids = drafter.runner_up(accepted, num_accepted)
                else:
                    next_ids = drafter.prepare(accepted, 1, may_go_on)
                if next_ids:
                    drafter.prepare(np.append(accepted, next_ids).astype(np.int32), k, may_go_on)
                    return  # another guess would take the cache to another text, and the way back costs its steps
        except SkydraftError:
            return  # the generation is closed, or drafting will say the same

    def close(self) -> None:
        """End with the step under way. It is not waited for: whoever collects garbage may be the one who calls this."""
        self._over.set()
        self._thread.shutdown(wait=False, cancel_futures=True)


def likeliest(block: DraftBlock, risk: Risk) -> list[int]:
    """How many tokens of a block may be accepted, so that what follows can be guessed, in order of their chance."""
    chances, stands = [], 1.0
    for index, signals in enumerate(block.signals):
        wrong = 0.0 if block.is_forced(index) else risk.of(signals)
        if wrong:
            chances.append((stands * wrong * _SECOND, index))
        stands *= 1 - wrong
    if block.finish is None:
        chances.append((stands * _BONUS, len(block.token_ids)))
    return [index for _, index in sorted(chances, reverse=True)]
