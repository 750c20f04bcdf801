"""What a step of a server without skydraft takes while it writes several texts at once, and while it reads a prompt."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from dataclasses import dataclass

from skydraft.edge.stock.costs import Costs
from skydraft.edge.stock.meeting import Met, written
from skydraft.edge.stock.wire import Wire
from skydraft.errors import CloudFailure, CloudLost, RateLimited

_NUM_WRITTEN, _LEAST = 12, 3  # tokens of each text; tokens that all texts must be written at once for
_PROMPT_LEN = 32
_LONG_PROMPTS = (64, 256)
_NUM_TIMES, _NUM_FIRST = 3, 4  # readings of a prompt; tokens after it, as a first one within a character is not told


@dataclass(frozen=True, slots=True)
class Steps:
    """`points` are (rows of a step, milliseconds), in order. The server writes at least `num_texts` texts at once."""

    points: tuple[tuple[int, float], ...]
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
    """Let the server write 1, 2, 4, …, `num_texts` texts at once, and read long prompts. Raises a SkydraftError.

    A server that lets some of the texts wait, or refuses them, writes fewer at once: then the larger numbers are left
    out.
    """
    points, most = dict[int, float](), 0
    for num in sorted({*itertools.takewhile(num_texts.__gt__, (2**n for n in range(30))), num_texts}):
        texts = (_times(wire, met, _PROMPT_LEN, _NUM_WRITTEN, timeout_s) for _ in range(num))
        found = await asyncio.gather(*texts, return_exceptions=True)  # none is left to run on
        for error in found:
            if isinstance(error, BaseException) and not (most and isinstance(error, CloudLost | RateLimited)):
                raise error
        times = [each for each in found if not isinstance(each, BaseException)]
        if len(times) < num:
            break
        began, ended = max(each[0] for each in times), min(each[-1] for each in times)
        num_steps = statistics.mean(sum(began < at <= ended for at in each) for each in times)
        if ended <= began or num_steps < _LEAST:
            break
        points[num], most = (ended - began) * 1e3 / num_steps, num
    if not most:
        raise CloudFailure("The server sends all tokens of a text at once, so its steps cannot be timed.")
    for length in _LONG_PROMPTS:
        if 0 < met.context_len <= length:
            break
        waits = []
        for _ in range(_NUM_TIMES):
            began = time.perf_counter()
            waits.append(((await _times(wire, met, length, _NUM_FIRST, timeout_s))[0] - began) * 1e3)
        points[max(length, most + 1)] = max(statistics.median(waits) - rtt_ms, 1e-3)
    return Steps(tuple(sorted(points.items())), most)


async def _times(wire: Wire, met: Met, prompt_len: int, num_tokens: int, timeout_s: float) -> list[float]:
    """When each token of a text came, after a prompt that is in no cache."""
    ids, times = [random.randrange(16) for _ in range(prompt_len)], list[float]()
    async for num_new, _ in written(wire, met, ids, num_tokens, timeout_s):
        times += [time.perf_counter()] * num_new
    if not times:
        raise CloudFailure("The server wrote no tokens.")
    return times
