"""The law of every KV cache, for engines that keep it and for those that break it: a toy of a few tokens, whole or
broken on purpose."""

import math
from collections.abc import Sequence as Seq
from contextlib import closing
from typing import Any

import numpy as np

from skydraft.engines.base import Engine, Sequence
from skydraft.engines.toy import ToyEngine, character_vocab
from skydraft.types import Recordings

VOCAB = character_vocab("我你他在说，。ab")
SIZE = VOCAB.size
# Largest difference between two ways to compute the same row in float32; logits here reach 20. Measured: 2e-5.
TOLERANCE = 2e-4


def some_text(engine: Engine, length: int, seed: int = 0) -> list[int]:
    """Random ids of tokens that are not special."""
    plain = np.setdiff1d(np.arange(engine.vocab.size), list(engine.vocab.special_ids))
    return list(np.random.default_rng(seed).choice(plain, length).tolist())


def one_by_one(engine: Engine, text: Seq[int], media: Recordings = ()) -> Any:
    """Logits [len(text), vocab.size] of a fresh sequence that was fed one token at a time."""
    with closing(engine.open(text, media)) as sequence:
        sequence.truncate(0)
        return np.stack([sequence.extend([token_id])[0].copy() for token_id in text])


def rows_after(sequence: Sequence, last: int, num_tokens: int = 3) -> list[Any]:
    """Rows [vocab.size] of greedy tokens, one at a time."""
    rows: list[Any] = []
    for _ in range(num_tokens):
        rows.append(sequence.extend([last])[0].copy())
        last = int(rows[-1].argmax())
    return rows


def largest_difference(
    engine: Engine, text: list[int], expected: Any, *, media: Recordings = (), max_rows: int = 6, num_steps: int = 80
) -> float:
    """Walks over `text` at random: feeds of any size, wrong tokens that are taken back, truncations to any length.

    Returns how far rows were from `expected`, those of one token at a time; infinity where the tokens were others.
    """
    rng, worst = np.random.default_rng(0), 0.0
    with closing(engine.open(text, media)) as sequence:
        sequence.truncate(0)
        for _ in range(num_steps):
            base = sequence.length
            if base == len(text) or rng.random() < 0.3:
                length = int(rng.integers(0, base + 1))
                for _ in range(2):  # the second time changes nothing
                    sequence.truncate(length)
                continue
            if rng.random() < 0.4:
                sequence.extend(rng.integers(0, engine.vocab.size, rng.integers(1, max_rows + 1)).tolist())
                sequence.truncate(base)
            fed = text[base : base + int(rng.integers(1, max_rows + 1))]
            rows = sequence.extend(fed)
            worst = max(worst, float(np.abs(rows - expected[base : base + len(fed)]).max()))
            if sequence.token_ids.tolist() != text[: base + len(fed)]:
                return math.inf
    return worst


def check_rollback(engine: Engine, prompt: list[int], media: Recordings = ()) -> None:
    """The same feeds give the same bits after any rollback, beside another text."""
    rng = np.random.default_rng(1)
    with closing(engine.open(prompt, media)) as straight, closing(engine.open(prompt, media)) as wandering:
        for token_id in [prompt[-1], *some_text(engine, 12, 2)]:
            for _ in range(2):
                wandering.extend(rng.integers(0, engine.vocab.size, rng.integers(1, 6)).tolist())
                wandering.truncate(straight.length)
            one, other = (each.extend([token_id]).copy() for each in (straight, wandering))
            assert np.array_equal(one, other)


def toy(kind: type[ToyEngine] = ToyEngine, context_len: int = 256, **options: Any) -> Any:
    rng = np.random.default_rng(4)
    tables = [rng.normal(0, 2, (rows, SIZE)).astype(np.float32) for rows in (SIZE, SIZE, 7)]
    return kind(VOCAB, tables[0], by_previous=tables[1], by_position=tables[2], context_len=context_len, **options)
