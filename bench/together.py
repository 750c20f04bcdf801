"""Several sequences in one forward of a transformers checkpoint, against one after another: times, and rows.

    python -m bench.together FOLDER [--sequences 1,2,4,8] [--rows 1,6] [--device cuda] [--dtype bfloat16]

Each sequence has a text of its own of 60 to 100 tokens. Both ways take turns; times are medians in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from skydraft.engines.base import Sequence
from skydraft.engines.options import EngineOptions
from skydraft.engines.transformers_text import TransformersEngine

Feeds = list[tuple[Sequence, Any]]


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def feeds_of(engine: TransformersEngine, num_sequences: int, num_rows: int) -> Feeds:
    rng = np.random.default_rng(7)
    texts = [rng.integers(0, engine.vocab.size, int(rng.integers(60, 101))) for _ in range(num_sequences)]
    return [(engine.open(text), rng.integers(0, engine.vocab.size, num_rows)) for text in texts]


def timed(feed: Callable[[Feeds], list[Any]], feeds: Feeds) -> tuple[float, list[Any]]:
    """(milliseconds, rows on the processor) of a forward that is taken back afterwards."""
    lengths = [sequence.length for sequence, _ in feeds]
    began = time.perf_counter()
    rows = [each.float().cpu() for each in feed(feeds)]
    took = (time.perf_counter() - began) * 1e3
    for (sequence, _), length in zip(feeds, lengths, strict=True):
        sequence.truncate(length)
    return took, rows


def compared(engine: TransformersEngine, num_sequences: int, num_rows: int, repeats: int) -> str:
    """A line of the table."""
    feeds = feeds_of(engine, num_sequences, num_rows)
    ways: dict[str, Callable[[Feeds], list[Any]]] = {
        "in turn": lambda feeds: [sequence.extend(token_ids) for sequence, token_ids in feeds],
        "together": engine.extend_batch,
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    rows: dict[str, list[Any]] = {}
    for _ in range(repeats):
        for name, feed in ways.items():
            ms, rows[name] = timed(feed, feeds)
            took[name].append(ms)
    for sequence, _ in feeds:
        sequence.close()
    pairs = list(zip(rows["in turn"], rows["together"], strict=True))
    same = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in pairs)
    apart = max(float((a - b).abs().max()) for a, b in pairs)
    alone, together = (statistics.median(took[name]) for name in ways)
    return (
        f"{num_sequences:>10}{num_rows:>10}{alone:>10.1f}{together:>10.1f}{alone / together:>8.2f}"
        f"{same:>6} of {num_sequences * num_rows:<3}{apart:>10.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sequences", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--rows", type=numbers, default=[1, 6])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    print(f"{'sequences':>10}{'rows each':>10}{'in turn':>10}{'together':>10}{'ratio':>8}{'same best':>12}{'apart':>9}")
    options = EngineOptions(context_len=512, device=given.device, dtype=given.dtype)
    with TransformersEngine(given.folder, options) as engine:
        for num_rows in given.rows:
            for num_sequences in given.sequences:
                print(compared(engine, num_sequences, num_rows, given.repeats), flush=True)


if __name__ == "__main__":
    main()
