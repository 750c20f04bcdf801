"""Repetition penalty, n-gram ban and minimum length equal transformers' logits processors, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from skydraft.choosing.constraints import Constraint, apply, no_end_before, no_repeat_ngram, repetition_penalty

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

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


def test_repetition_penalty() -> None:
    num_negative = 0
    for rng, prefix, row in random_cases():
        penalty = float(rng.choice([0.5, 0.9, 1.05, 1.22, 1.3, 2.0, 7.5]))
        processor = transformers.RepetitionPenaltyLogitsProcessor(penalty)
        assert_equal(repetition_penalty(penalty), processor, prefix, row)
        num_negative += int((row[prefix] < 0).any())
    assert num_negative > NUM_CASES / 4


def test_no_repeat_ngram() -> None:
    num_with_bans = num_too_short = 0
    for _, prefix, row in random_cases():
        for size in (1, 2, 3, 4, 5):
            processor = transformers.NoRepeatNGramLogitsProcessor(size)
            edited = assert_equal(no_repeat_ngram(size), processor, prefix, row)
            num_with_bans += bool(np.isinf(edited).any())
            num_too_short += len(prefix) < size
    assert num_with_bans > NUM_CASES and num_too_short > NUM_CASES / 4


def test_min_new_tokens() -> None:
    num_banned = 0
    for rng, prefix, row in random_cases(500):
        prompt_len = int(rng.integers(1, len(prefix) + 1))
        num_tokens = int(rng.integers(0, 12))
        end_ids = rng.choice(VOCAB_SIZE, rng.integers(1, 4), replace=False).tolist()
        processor = transformers.MinNewTokensLengthLogitsProcessor(prompt_len, num_tokens, end_ids)
        edited = assert_equal(no_end_before(num_tokens, prompt_len, end_ids), processor, prefix, row)
        num_banned += bool(np.isinf(edited).any())
    assert 50 < num_banned < 450


def test_all_three_in_the_order_of_generate() -> None:
    for rng, prefix, row in random_cases(500):
        penalty, size, end_ids = float(rng.uniform(0.8, 2)), int(rng.integers(1, 4)), [1, 5]
        prompt_len = max(1, len(prefix) - 3)
        ours = [repetition_penalty(penalty), no_repeat_ngram(size), no_end_before(4, prompt_len, end_ids)]
        theirs = transformers.LogitsProcessorList(
            [
                transformers.RepetitionPenaltyLogitsProcessor(penalty),
                transformers.NoRepeatNGramLogitsProcessor(size),
                transformers.MinNewTokensLengthLogitsProcessor(prompt_len, 4, end_ids),
            ]
        )
        assert_equal(lambda tokens, ours=ours: [edit for one in ours for edit in one(tokens)], theirs, prefix, row)
