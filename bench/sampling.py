"""Choosing for a worker's step: all rows at once against one after the other, in the same run.

    python -m bench.sampling [--sessions N] [--rows N] [--vocab N] [--equal N] [--no-model]

Rows are those of the draft model of the demo pair along dev prompts, and normal ones of two widths, of which the wide
ones are like a text and the narrow ones flatter than any. Tokens of both ways are compared. `--equal` compares so many
random rows on the way of a device with those on the host, on torch's CPU tensors. Times are medians, in ms.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.workload import machine, prompts
from skydraft.choosing.chooser import Chooser, Question, choose_all, pick_on_device
from skydraft.config import DecodingParams
from skydraft.engines.vocab import Vocab

Array = npt.NDArray[Any]
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "T=0.8": {"temperature": 0.8},
    "T=0.8 top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "T=0.8 top-k 50": {"temperature": 0.8, "top_k": 50},
    "T=0.8 min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
}


def question(row: Array, params: DecodingParams, position: int) -> Question:
    """Which token has this position? Without constraints it makes no difference what the tokens are."""
    return Question(Chooser(params, Vocab((), list, end_ids=()), 0), row, np.zeros(position, np.int32))


def model_rows(num_rows: int) -> Array:
    """Raw logits of the draft model along the dev prompts, [num_rows, vocab]."""
    import skydraft
    from skydraft.models import default_pair
    from skydraft.prompts.messages import asked
    from skydraft.prompts.pair import prompt_ids

    with skydraft.load(default_pair().draft) as engine:
        rows = np.empty((num_rows, engine.vocab.size), np.float32)
        filled, texts = 0, prompts()
        while filled < num_rows:
            prompt = prompt_ids(engine.vocab, asked(texts[filled // 16 % len(texts)]))
            sequence, token_id = engine.open(prompt), prompt[-1]
            for row in rows[filled : filled + 16]:
                row[:] = sequence.extend([token_id])[0]
                token_id = int(row.argmax())
            sequence.close()
            filled += 16
    return rows


def normal_rows(num_rows: int, vocab_size: int, head: bool) -> Array:
    """Normal logits of deviation 3, or of 2.2 with a head of 300 tokens above them."""
    rng = np.random.default_rng(0)
    rows = rng.normal(0, 2.2 if head else 3, (num_rows, vocab_size)).astype(np.float32)
    for row in rows if head else ():
        row[rng.integers(0, vocab_size, 300)] += rng.exponential(4, 300).astype(np.float32) + 6
    return rows


def timed(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median ms of each way, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            times[name].append((time.perf_counter() - began) * 1e3)
    return {name: statistics.median(each) for name, each in times.items()}


def step(kind: str, rows: Array) -> None:
    """A line for each setting."""
    for name, options in SETTINGS.items():
        params = DecodingParams(seed=7, **options)
        asked = [question(row, params, position) for position, row in enumerate(rows)]
        ways = {
            "at once": lambda asked=asked: choose_all(asked),
            "one by one": lambda asked=asked: [each.chooser.choose(each.row, each.prefix) for each in asked],
        }
        assert ways["at once"]() == ways["one by one"](), (kind, name)
        ms = timed(ways, 5)
        print(f"{kind:<22}{name:<20}" + "".join(f"{ms[way]:>12.1f}" for way in ways), flush=True)


def equal_on_device(num_rows: int, vocab_size: int) -> None:
    """Compare the way of a device, taken by torch's tensors, with that of numpy."""
    import torch

    rng, num_done, num_different, batch = np.random.default_rng(5), 0, 0, 64
    while num_done < num_rows:
        rows = rng.normal(0, rng.choice([0.5, 2, 3, 8]), (batch, vocab_size)).astype(np.float32)
        rows = np.round(rows) if rng.random() < 0.2 else rows
        rows[rng.random(rows.shape) < rng.choice([0, 0, 0.9])] = -np.inf
        rows[:, 0] = 0
        params = [
            DecodingParams(
                temperature=float(rng.choice([0, 0.3, 0.8, 1.5])), top_k=int(rng.choice([0, 0, 50])),
                top_p=float(rng.choice([1, 0.95, 0.5])), min_p=float(rng.choice([0, 0, 0.05])),
                seed=int(rng.integers(2**63)),
            ) for _ in rows
        ]  # fmt: skip
        here = choose_all([question(row, each, at) for at, (row, each) in enumerate(zip(rows, params, strict=True))])
        there = pick_on_device([torch.from_numpy(row) for row in rows], params, range(batch))
        num_different += sum(one != other for one, other in zip(here, there, strict=True))
        num_done += batch
    print(f"torch and numpy, rows of {vocab_size}: {num_different} of {num_done} tokens differ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--rows", type=int, default=6, help="of each session")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--equal", type=int, default=0, metavar="N")
    parser.add_argument("--no-model", action="store_true")
    given = parser.parse_args()
    if given.equal:
        equal_on_device(given.equal, min(given.vocab, 20_000))
        return
    num_rows = given.sessions * given.rows
    print(machine())
    print(f"{num_rows} rows; ms")
    print(f"{'rows':<22}{'setting':<20}{'at once':>12}{'one by one':>12}")
    if not given.no_model:
        step("of the draft model", model_rows(num_rows))
    step("normal, with a head", normal_rows(num_rows, given.vocab, True))
    step("normal, flat", normal_rows(num_rows, given.vocab, False))


if __name__ == "__main__":
    main()
