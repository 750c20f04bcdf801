"""What comes out follows the target's distribution: exact probabilities, chi-square, and proof that it can fail.

What is drafted has the tokens of the target alone (tests/decoding/test_laws.py), and so its distribution.

Each test counts over seeds 0 to NUM_SEEDS - 1, so its outcome never changes; SIGNIFICANCE is the chance that a
right sampler would have been rejected when the seeds were chosen.
"""

from functools import cache

import numpy as np
import pytest

from skydraft.choosing import chooser
from skydraft.choosing.chooser import Chooser
from skydraft.choosing.sampling import _gumbel, _words, sample
from skydraft.config import decoding_params
from skydraft.engines.toy import ToyEngine
from skydraft.engines.vocab import Vocab

from .. import reference
from ..later import later

stats = later("scipy.stats")

SIGNIFICANCE = 1e-4
NUM_SEEDS = 1000
SIZE = 7
VOCAB = Vocab([b"%d" % index for index in range(SIZE)], lambda text: [int(char) for char in text])

WARPERS = {
    "hot": {"temperature": 1.4}, "cool": {"temperature": 0.6}, "top-k": {"temperature": 1.0, "top_k": 4},
    "top-p": {"temperature": 0.9, "top_p": 0.8}, "min-p": {"temperature": 1.2, "min_p": 0.1},
    "all": {"temperature": 1.1, "top_k": 5, "top_p": 0.9, "min_p": 0.03},
}  # fmt: skip


_last, _previous = np.random.default_rng(3).normal(0, 1, (2, SIZE, SIZE)).astype(np.float32)
CLOUD = ToyEngine(VOCAB, _last, by_previous=_previous)


@cache
def row_after(*token_ids: int) -> np.ndarray:
    return reference.row_after(CLOUD, token_ids)


def exact(options: dict[str, float]) -> np.ndarray:
    """Probabilities of the first two tokens after the prompt "12". [SIZE, SIZE]"""
    rows = row_after(1, 2), *(row_after(1, 2, first) for first in range(SIZE))
    first, *then = (reference.probabilities(reference.warped(row, decoding_params(**options))) for row in rows)
    return first[:, None] * np.array(then)


def counted(options: dict[str, float]) -> np.ndarray:
    """What is chosen after it, without all that is around the choices of a target, over all seeds. [SIZE, SIZE]"""
    counts = np.zeros((SIZE, SIZE))
    for seed in range(NUM_SEEDS):
        chooser = Chooser(decoding_params(seed=seed, **options), VOCAB, 2)
        first = chooser.choose(row_after(1, 2), np.array([1, 2]))
        counts[first, chooser.choose(row_after(1, 2, first), np.array([1, 2, first]))] += 1
    return counts


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Chi-square of counts against exact probabilities; cells that expect fewer than 5 are put together."""
    assert counts[probabilities == 0].sum() == 0, "a token that the warpers cut away was sampled"
    expected = probabilities.ravel() * counts.sum()
    order = np.argsort(-expected)
    large = order[expected[order] >= 5]
    small = order[expected[order] < 5]
    observed = [*counts.ravel()[large], counts.ravel()[small].sum()]
    wanted = [*expected[large], expected[small].sum()]
    if wanted[-1] < 5:
        observed[-2:], wanted[-2:] = [sum(observed[-2:])], [sum(wanted[-2:])]
    return float(stats.chisquare(observed, np.array(wanted) * sum(observed) / sum(wanted)).pvalue)


def least_p_value(options: dict[str, float]) -> float:
    """Of the first token, and of both."""
    counts, joint = counted(options), exact(options)
    return min(p_value(counts, joint), p_value(counts.sum(axis=1), joint.sum(axis=1)))


@pytest.mark.parametrize("options", WARPERS.values(), ids=WARPERS)
def test_the_target_alone_follows_its_distribution(options):
    assert least_p_value(options) > SIGNIFICANCE


BROKEN = {
    "heated twice": lambda scores, params, position: sample(scores / params.temperature, params, position),
    "the same noise everywhere": lambda scores, params, position: sample(scores, params, 0),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_broken_sampler_is_rejected_at_the_same_level(monkeypatch, broken):
    """F7, temperature twice, and one noise for several positions."""
    monkeypatch.setattr(chooser, "sample", broken)
    assert least_p_value(WARPERS["cool"]) < SIGNIFICANCE


@pytest.mark.parametrize(("seed", "position", "token_id", "expected"), [
    (0, 0, 0, -0.6807578025137784),
    (42, 100, 151645, 2.550553142929694),
    (18446744073709551615, 4095, 12345, 0.057825512835772856),
    (123456789, 7, 2147483647, 0.286348149690537),
])  # fmt: skip
def test_the_noise_never_changes(seed, position, token_id, expected):
    assert _gumbel(_words(seed, position, np.array([token_id])))[0] == pytest.approx(expected, rel=1e-12)
    assert reference.noise(seed, position, token_id) == pytest.approx(expected, rel=1e-12)
