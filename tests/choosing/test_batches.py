"""Choosing for many rows at once gives what each row gives alone, or the error that it gives."""

from __future__ import annotations

import numpy as np

from skydraft.choosing.chooser import Chooser, Question, choose_all
from skydraft.config import DecodingParams
from skydraft.errors import EngineError
from tests import toys
from tests.toys import VOCAB


def some_params(rng: np.random.Generator) -> DecodingParams:
    return DecodingParams(
        temperature=float(rng.choice([0, 0, 0.8, 1.3])),
        top_k=int(rng.choice([0, 0, 4])),
        top_p=float(rng.choice([1, 0.9, 0.5])),
        min_p=float(rng.choice([0, 0.05])),
        repetition_penalty=float(rng.choice([1, 1.3])),
        no_repeat_ngram_size=int(rng.choice([0, 2])),
        logit_bias=((5, 2.5),) if rng.random() < 0.3 else (),
        seed=int(rng.integers(0, 2**63)),
    )


def test_a_row_in_a_batch_gives_what_it_gives_alone() -> None:
    """1,000 rows in batches of up to 40, with constraints; some hold what is no number."""
    num_refused = 0
    for number in range(50):
        rng = np.random.default_rng(number)
        questions, expected = [], []
        for _ in range(rng.integers(1, 40)):
            row = rng.normal(0, rng.choice([0.1, 3, 30]), VOCAB.size).astype(np.float32)
            row = np.round(row) if rng.random() < 0.4 else row
            row[3] = rng.choice([row[3], -np.inf, np.nan], p=[0.8, 0.1, 0.1])
            prefix = toys.array(rng.integers(0, VOCAB.size, rng.integers(1, 30)).tolist())
            params = some_params(rng)
            questions.append(Question(Chooser(params, VOCAB, 1), row, prefix))
            expected.append("not numbers" if np.isnan(row).any() else Chooser(params, VOCAB, 1).choose(row, prefix))
        picked = choose_all(questions)
        num_refused += sum(isinstance(choice, EngineError) for choice in picked)
        assert ["not numbers" if isinstance(choice, EngineError) else choice for choice in picked] == expected, number
    assert num_refused > 25
