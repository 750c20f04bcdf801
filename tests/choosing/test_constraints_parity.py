"""Repetition penalty, n-gram ban and minimum length equal transformers' logits processors, bit for bit."""

from typing import Any

import numpy as np

from skydraft.choosing.chooser import Chooser
from skydraft.config import DecodingParams
from skydraft.engines.vocab import Vocab

from ..later import later

torch = later("torch")
transformers = later("transformers")

SIZE = 24  # few tokens, so that n-grams do repeat
NUM_CASES = 400


def test_each_of_three_and_all_in_the_order_of_generate() -> None:
    """Random prefixes of 1 to 40 tokens, many of them short, and rows with logits of both signs and zeros."""
    num_edited = np.zeros(4, int)
    for seed in range(NUM_CASES):
        rng = np.random.default_rng(seed)
        length = int(rng.integers(1, 7) if seed % 2 else rng.integers(1, 41))
        prefix = rng.integers(0, rng.choice([2, 6, SIZE]), length).astype(np.int32)
        row = rng.normal(rng.choice([-5, 0, 5]), 4, SIZE).astype(np.float32)
        row[rng.integers(0, SIZE, 2)] = 0
        penalty, size = float(rng.choice([0.5, 0.9, 1.05, 1.22, 1.3, 2.0, 7.5])), int(rng.integers(1, 6))
        prompt_len, num_tokens = int(rng.integers(1, len(prefix) + 1)), int(rng.integers(1, 12))
        end_ids = rng.choice(SIZE, rng.integers(1, 4), replace=False).tolist()
        vocab = Vocab([b"%d" % number for number in range(SIZE)], list, end_ids=end_ids)
        ours: list[dict[str, Any]] = [
            {"repetition_penalty": penalty}, {"no_repeat_ngram_size": size}, {"min_new_tokens": num_tokens}
        ]  # fmt: skip
        theirs = [
            transformers.RepetitionPenaltyLogitsProcessor(penalty),
            transformers.NoRepeatNGramLogitsProcessor(size),
            transformers.MinNewTokensLengthLogitsProcessor(prompt_len, num_tokens, end_ids),
        ]
        pairs = [
            *zip(ours, theirs, strict=True),
            (ours[0] | ours[1] | ours[2], transformers.LogitsProcessorList(theirs)),
        ]
        before, ids = row.copy(), torch.from_numpy(prefix.astype(np.int64))[None]
        for number, (options, processor) in enumerate(pairs):
            expected = processor(ids, torch.from_numpy(row.copy())[None])[0].numpy()
            edited = Chooser(DecodingParams(**options), vocab, prompt_len).constrain(row, prefix)
            # where every token is banned the choice is made of the row as it came
            assert np.array_equal(edited, expected if expected.max() > -np.inf else row)
            assert np.array_equal(row, before), "a constraint must not change the row that it is given"
            num_edited[number] += not np.array_equal(row, edited)
    assert num_edited.min() > NUM_CASES / 8
