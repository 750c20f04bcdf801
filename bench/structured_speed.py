"""What a grammar costs in tokens a second, in pairs, by processor time: with one thread what a free machine shows."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from skydraft import Engine, Generation, api
from skydraft.decoding.request import GenerateRequest

_ANY_TEXT = r"regex:(?s:.*)"


def speed(
    sides: tuple[Engine, Engine], tasks: list[Any], request_of: Callable[..., GenerateRequest], part_len: int
) -> None:
    """Print medians over tasks of tokens a second for each mode: free, under a grammar of any text, of the answer.

    The first two write the same tokens, so that their ratio is what masks cost; the third writes others.
    """
    edge, cloud = sides
    for engine in sides:
        engine.max_batch_rows = part_len
    for mode in ("cloud", "lossless", "quality", "edge"):
        speeds: dict[str, list[float]] = defaultdict(list)
        num_same = 0
        for number, task in enumerate(tasks):
            free = request_of(task, mode, False)
            free = replace(free, params=replace(free.params, max_new_tokens=48))
            ways = {
                "free": free,
                "any text": replace(free, params=replace(free.params, grammar=_ANY_TEXT)),
                "answer": request_of(task, mode, True),
            }
            texts = {}
            read = replace(request_of(task, "lossless", False), params=replace(free.params, max_new_tokens=1))
            with api.start(read, edge=edge, cloud=cloud) as generation:
                generation.run()  # so that all find the prompt read by both models
            for name in sorted(ways, reverse=bool(number % 2)):
                with api.start(ways[name], edge=edge, cloud=cloud) as generation:
                    speeds[name].append(tokens_per_s(generation))
                    texts[name] = generation.token_ids
            num_same += texts["free"] == texts["any text"]
        medians = {name: statistics.median(found) for name, found in speeds.items()}
        ratios = {
            name: statistics.median(a / b for a, b in zip(speeds[name], speeds["free"], strict=True))
            for name in ("any text", "answer")
        }
        print(
            f"{mode:9} tokens/s: free {medians['free']:.2f}, any text {medians['any text']:.2f}, answer "
            f"{medians['answer']:.2f}; any text / free {ratios['any text']:.3f} (same tokens in {num_same} of "
            f"{len(tasks)}), answer / free {ratios['answer']:.3f}",
            flush=True,
        )


def tokens_per_s(generation: Generation) -> float:
    """Run a generation to its end: tokens a second of processor time after its first round, which reads the prompt."""
    rounds = generation.rounds()
    next(rounds)
    began = time.process_time()
    num_tokens = sum(done.record.num_committed for done, _ in rounds)
    return num_tokens / max(time.process_time() - began, 1e-6)
