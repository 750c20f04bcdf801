"""Repetition penalty, n-gram ban and minimum length equal transformers' logits processors, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from skydraft.choosing.constraints import Constraint, apply, no_end_before, no_repeat_ngram, repetition_penalty

from ..later import later

torch = later("torch")
transformers = later("transformers")

VOCAB_SIZE = 24  # few tokens, so that n-grams do repeat
NUM_CASES = 2000


def random_cases(num_cases: int = NUM_CASES) -> Iterable[tuple[np.random.Generator, np.ndarray, np.ndarray]]:
    """Random prefixes of 1 to 40 tokens, many of them short, and rows with logits of both signs and zeros."""
    for seed in range(num_cases):
        rng = np.random.default_rng(seed)
        length = int(rng.integers(1, 7) if seed % 2 else rng.integers(1, 41))
        prefix = rng.integers(0, rng.choice([2, 6, VOCAB_SIZE]), length).astype(np.int32)
        row = rng.normal(rng.choice([-5, 0, 5]), 4, VOCAB_SIZE).astype(np.float32)
        row[rng.integers(0, VOCAB_SIZE, 2)] = 0
        yield rng, prefix, row


def assert_equal(constraint: Constraint, processor: Any, prefix: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Both edit the row alike, as numpy and as torch; returns the edited row."""
    before = row.copy()
    expected = processor(torch.from_numpy(prefix.astype(np.int64))[None], torch.from_numpy(row.copy())[None])[0].numpy()
    edited = apply(row, constraint(prefix))
    as_torch = apply(torch.from_numpy(row), constraint(prefix)).numpy()
    assert np.array_equal(edited, expected) and np.array_equal(as_torch, expected)
    assert np.array_equal(row, before), "a constraint must not change the row it is given"
    return np.asarray(edited)


def test_each_of_three_and_all_in_the_order_of_generate() -> None:
    num_edited = np.zeros(4, int)
    for rng, prefix, row in random_cases():
        penalty, size = float(rng.choice([0.5, 0.9, 1.05, 1.22, 1.3, 2.0, 7.5])), int(rng.integers(1, 6))
        prompt_len, num_tokens = int(rng.integers(1, len(prefix) + 1)), int(rng.integers(0, 12))
        end_ids = rng.choice(VOCAB_SIZE, rng.integers(1, 4), replace=False).tolist()
        ours = [repetition_penalty(penalty), no_repeat_ngram(size), no_end_before(num_tokens, prompt_len, end_ids)]
        theirs = [
            transformers.RepetitionPenaltyLogitsProcessor(penalty),
            transformers.NoRepeatNGramLogitsProcessor(size),
            transformers.MinNewTokensLengthLogitsProcessor(prompt_len, num_tokens, end_ids),
        ]
        edited = [assert_equal(*pair, prefix, row) for pair in zip(ours, theirs, strict=True)]
        whole = transformers.LogitsProcessorList(theirs)
        edited.append(assert_equal(lambda ids, ours=ours: [e for one in ours for e in one(ids)], whole, prefix, row))
        num_edited += [not np.array_equal(row, each) for each in edited]
    assert num_edited.min() > NUM_CASES / 8
