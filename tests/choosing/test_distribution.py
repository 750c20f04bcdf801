"""What comes out follows the target's distribution: exact probabilities, chi-square, and proof that it can fail.

What is drafted has the tokens of the target alone (tests/decoding/test_laws.py), and so its distribution.

Each test counts over seeds 0 to NUM_SEEDS - 1, so its outcome never changes; SIGNIFICANCE is the chance that a
right sampler would have been rejected when the seeds were chosen.
"""

import itertools
from functools import cache

import numpy as np
import pytest

from skydraft import DecodingParams
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
def exact(params: DecodingParams) -> np.ndarray:
    """Probabilities of the first three tokens after the prompt "12", enumerated. [SIZE, SIZE, SIZE]"""
    joint = np.zeros((SIZE, SIZE, SIZE))
    for first, second in itertools.product(range(SIZE), repeat=2):
        steps = [[1, 2], [1, 2, first], [1, 2, first, second]]
        probs = [reference.probabilities(reference.warped(reference.row_after(CLOUD, step), params)) for step in steps]
        joint[first, second] = probs[0][first] * probs[1][second] * probs[2]
    return joint


def counted(options: dict[str, float]) -> np.ndarray:
    """Counts of the first three tokens over all seeds. [SIZE, SIZE, SIZE]"""
    counts = np.zeros((SIZE, SIZE, SIZE))
    for seed in range(NUM_SEEDS):
        counts[tuple(chosen(decoding_params(seed=seed, max_new_tokens=3, **options)))] += 1
    return counts


def chosen(params: DecodingParams) -> list[int]:
    """What the target writes alone, without all that is around its choices."""
    token_ids, chooser = [1, 2], Chooser(params, VOCAB, 2)
    for _ in range(3):
        token_ids.append(chooser.choose(row_after(tuple(token_ids)), np.array(token_ids)))
    return token_ids[2:]


@cache
def row_after(token_ids: tuple[int, ...]) -> np.ndarray:
    return reference.row_after(CLOUD, token_ids)


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


def p_values(counts: np.ndarray, options: dict[str, float]) -> dict[str, float]:
    """First token, first pair, second pair."""
    joint = exact(decoding_params(**options))
    axes = {"first": (1, 2), "first pair": (2,), "second pair": (0,)}
    return {name: p_value(counts.sum(axis=axis), joint.sum(axis=axis)) for name, axis in axes.items()}


@pytest.mark.parametrize("options", WARPERS.values(), ids=WARPERS)
def test_the_target_alone_follows_its_distribution(options):
    assert min(p_values(counted(options), options).values()) > SIGNIFICANCE


def heated_twice(scores, params, position):
    return sample(scores / params.temperature, params, position)


def same_noise_everywhere(scores, params, position):
    return sample(scores, params, 0)


@pytest.mark.parametrize("broken", [heated_twice, same_noise_everywhere])
def test_a_broken_sampler_is_rejected_at_the_same_level(monkeypatch, broken):
    """F7, temperature twice, and one noise for several positions."""
    monkeypatch.setattr(chooser, "sample", broken)
    assert min(p_values(counted(WARPERS["cool"]), WARPERS["cool"]).values()) < SIGNIFICANCE


@pytest.mark.parametrize(("seed", "position", "token_id", "expected"), [
    (0, 0, 0, -0.6807578025137784),
    (42, 100, 151645, 2.550553142929694),
    (18446744073709551615, 4095, 12345, 0.057825512835772856),
    (123456789, 7, 2147483647, 0.286348149690537),
])  # fmt: skip
def test_the_noise_never_changes(seed, position, token_id, expected):
    assert _gumbel(_words(seed, position, np.array([token_id])))[0] == pytest.approx(expected, rel=1e-12)
    assert reference.noise(seed, position, token_id) == pytest.approx(expected, rel=1e-12)
