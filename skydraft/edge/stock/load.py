"""What a step of a server without skydraft takes while it writes several texts at once, and while it reads a prompt."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from skydraft.edge.stock.costs import Costs
from skydraft.edge.stock.meeting import Met, written
from skydraft.edge.stock.wire import Wire
from skydraft.errors import CloudFailure, CloudLost, RateLimited

_NUM_WRITTEN, _LEAST = 12, 3  # tokens of each text; tokens that all texts must be written at once for
_PROMPT_LEN = 32  # steps take longer after longer texts
_READ_LENS = (5, 17, 65, 257)
_NUM_TIMES, _NUM_FIRST = 3, 4  # readings of a prompt; tokens after it, as a first one within a character is not told

Points: TypeAlias = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Steps:
    """Points are (number, milliseconds), in order: of a step that writes so many texts, and what reading adds to it.

    Tokens that are only read cost less than as many texts. The server writes at least `num_texts` texts at once.
    """

    writing: Points
    reading: Points
    num_texts: int


@dataclass(frozen=True, slots=True)
class Examined:
    """A server's model and costs, and how many tokens of a prompt of `num_sent` it had in its cache the second time."""

    met: Met
    costs: Costs
    rtt_ms: float
    num_sent: int
    num_cached: int


async def measure_steps(wire: Wire, met: Met, num_texts: int, rtt_ms: float, timeout_s: float) -> Steps:
    """Let the server write 1, 2, 3, 4, 6, 8, … `num_texts` texts at once, and read prompts. Raises a SkydraftError.

    A server that lets some of the texts wait, or refuses them, writes fewer at once: then the larger numbers are left
    out.
    """
    writing, reading = dict[int, float](), dict[int, float]()
    for num in sorted({*itertools.takewhile(num_texts.__gt__, _numbers()), num_texts}):
        texts = (_times(wire, met, _PROMPT_LEN, _NUM_WRITTEN, timeout_s) for _ in range(num))
        found = await asyncio.gather(*texts, return_exceptions=True)  # none is left to run on
        for error in found:
            if isinstance(error, BaseException) and not (writing and isinstance(error, CloudLost | RateLimited)):
                raise error
        times = [each for each in found if not isinstance(each, BaseException)]
        if len(times) < num:
            break
        began, ended = max(each[0] for each in times), min(each[-1] for each in times)
        num_steps = statistics.mean(sum(began < at <= ended for at in each) for each in times)
        if ended <= began or num_steps < _LEAST:
            break
        writing[num] = (ended - began) * 1e3 / num_steps
    if not writing:
        raise CloudFailure("The server sends all tokens of a text at once, so its steps cannot be timed.")
    for length in itertools.takewhile((met.context_len or math.inf).__gt__, _READ_LENS):
        waits = []
        for _ in range(_NUM_TIMES):
            began = time.perf_counter()
            waits.append(((await _times(wire, met, length, _NUM_FIRST, timeout_s))[0] - began) * 1e3)
        reading[length - 1] = max(statistics.median(waits) - rtt_ms - writing[1], 0.0)
    return Steps(tuple(writing.items()), tuple(reading.items()), max(writing))


def _numbers() -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, …: steps of one number more may take much more, or less, than those before."""
    yield 1
    for num in (2**n for n in itertools.count(1)):
        yield from (num, num * 3 // 2)


async def _times(wire: Wire, met: Met, prompt_len: int, num_tokens: int, timeout_s: float) -> list[float]:
    """When each token of a text came, after a prompt that is in no cache."""
    ids, times = [random.randrange(16) for _ in range(prompt_len)], list[float]()
    async for num_new, _ in written(wire, met, ids, num_tokens, timeout_s):
        times += [time.perf_counter()] * num_new
    if not times:
        raise CloudFailure("The server wrote no tokens.")
    return times
