"""Choosing for many rows at once gives what each row gives alone, where rows lie here or elsewhere, by definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.choosing import chooser as choosing
from skydraft.choosing import sampling
from skydraft.choosing.chooser import Chooser, Question, choose_all, pick_on_device
from skydraft.choosing.sampling import gumbel_noise, noisier_on_device, noisier_than, sample, sample_whole
from skydraft.config import DecodingParams
from skydraft.errors import EngineError
from tests import toys
from tests.toys import VOCAB, law

SIZE = 5003  # no multiple of a group


def random_row(rng: np.random.Generator, size: int = SIZE) -> np.ndarray:
    """Flat or peaked, far from 0 or near, with ties, bans, a heavy head, of 16 or 32 bits in a float32."""
    row = rng.normal(rng.choice([-200, 0, 30]), rng.choice([0.01, 1, 3, 12]), size).astype(np.float32)
    row[rng.integers(0, size, rng.integers(0, 40))] += np.float32(rng.uniform(0, 25))
    if rng.random() < 0.3:
        row = np.round(row, int(rng.integers(0, 2)))
    if rng.random() < 0.3:
        row = (row.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # what bfloat16 can hold
    row[rng.permutation(size)[: rng.choice([0, 0, 10, size // 2, size - 3, size - 1])]] = -np.inf
    return row


def random_params(rng: np.random.Generator, *, greedy: bool = True) -> DecodingParams:
    return DecodingParams(
        temperature=float(rng.choice([0.0 if greedy else 1.0, 1e-6, 0.05, 0.8, 0.8, 1.5, 30])),
        top_k=int(rng.choice([0, 0, 1, 5, 50, 400, SIZE - 1, SIZE, 2 * SIZE])),
        top_p=float(rng.choice([1, 1, 0.95, 0.5, 0.999, 1e-9])),
        min_p=float(rng.choice([0, 0, 0.05, 1e-7, 1])),
        seed=int(rng.integers(0, 2**63)),
    )


def test_what_is_near_the_top_decides_as_the_whole_row_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of rows, filters in every combination; and it is the short way that is taken, mostly."""
    looked_at: list[int] = []
    monkeypatch.setattr(sampling, "sample_whole", lambda *asked: looked_at.append(seed) or sample_whole(*asked))
    for seed in range(4000):
        rng = np.random.default_rng(seed)
        row, params = random_row(rng), random_params(rng, greedy=False)
        before, position = row.copy(), int(rng.integers(0, 5000))
        expected = sample_whole(row, params, position)
        assert sample(row, params, position) == expected, seed
        assert np.array_equal(row, before)
    assert len(looked_at) < 2600


@law(100)
@given(st.integers(0, 10**6), st.sampled_from([2.5, 3.0, 4.0]), st.floats(0.3, 0.999), st.integers(0, 300))
def test_a_flat_top_is_weighed_as_the_whole_row_is(seed: int, width: float, top_p: float, position: int) -> None:
    row = np.random.default_rng(seed).normal(0, width, 30_000).astype(np.float32)
    params = DecodingParams(temperature=0.8, top_p=top_p, seed=seed)
    assert sample(row, params, position) == sample_whole(row, params, position)


@pytest.mark.parametrize("above", [-1e-12, 0.0, 1e-12])
def test_where_the_mass_is_at_its_limit_the_whole_row_decides(above: float) -> None:
    """Tokens of equal mass, of which top-p keeps just so many: too close for sums in another order."""
    row = np.full(SIZE, -np.inf, np.float32)
    row[::100] = 1.0
    num = len(row[::100])
    for kept in range(1, num):
        params = DecodingParams(temperature=0.7, top_p=kept / num * (1 + above), seed=kept)
        assert sample(row, params, 3) == sample_whole(row, params, 3)


@law(50)
@given(st.integers(0, 2**64 - 1), st.integers(0, 5000), st.floats(-4, 37), st.integers(1, 30_000))
def test_whose_noise_is_rare_is_found_here_and_elsewhere(seed: int, position: int, noise: float, size: int) -> None:
    torch = pytest.importorskip("torch")
    expected = np.flatnonzero(gumbel_noise(seed, position, np.arange(size)) >= noise)
    found = noisier_than(noise, seed, position, size)
    assert set(expected) <= set(found.tolist()) and len(found) <= len(expected) + 2
    elsewhere = noisier_on_device([noise, 5.0], [seed, 1], [position, 2], torch.empty(2, size))
    assert np.array_equal(elsewhere[0], found)
    assert np.array_equal(elsewhere[1], noisier_than(5.0, 1, 2, size))


def as_kind(row: np.ndarray, kind: str) -> Any:
    if kind == "numpy":
        return row
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(row.copy())
    return tensor.to(torch.bfloat16) if kind == "bfloat16" else tensor


def test_a_row_in_a_batch_gives_what_it_gives_alone_wherever_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 rows in batches of up to 40, each of another kind, with constraints; some are no numbers."""
    on_host = choosing.is_on_host
    for number in range(100):
        rng = np.random.default_rng(number)
        questions, expected = [], []
        for _ in range(rng.integers(1, 40)):
            row = rng.normal(0, rng.choice([0.1, 3, 30]), VOCAB.size).astype(np.float32)
            row = np.round(row) if rng.random() < 0.4 else row
            row[3] = rng.choice([row[3], -np.inf, np.nan], p=[0.8, 0.1, 0.1])
            prefix = toys.array(rng.integers(0, VOCAB.size, rng.integers(1, 30)).tolist())
            params = with_constraints(rng)
            chooser = Chooser(params, VOCAB, 1)
            kind = as_kind(row, str(rng.choice(["numpy", "float32", "bfloat16"])))
            questions.append(Question(chooser, kind, prefix))
            expected.append(alone(chooser, params, kind, prefix))
        for is_here in (on_host, lambda rows: isinstance(rows, np.ndarray)):  # torch's tensors as if on a device
            monkeypatch.setattr(choosing, "is_on_host", is_here)
            assert [str(choice) for choice in choose_all(questions)] == expected, number
        monkeypatch.setattr(choosing, "is_on_host", on_host)


def alone(chooser: Chooser, params: DecodingParams, row: Any, prefix: np.ndarray) -> str:
    """The token as the whole float32 row gives it, or what is wrong with it."""
    row = row if isinstance(row, np.ndarray) else row.float().numpy()
    scores = chooser.constrain(row, prefix)
    if np.isnan(scores).any():
        return str(sampling.no_number())
    return str(sample_whole(scores, params, len(prefix) - 1) if params.temperature else int(scores.argmax()))


def with_constraints(rng: np.random.Generator) -> DecodingParams:
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


def test_rows_of_a_large_vocabulary_are_the_same_on_the_way_of_a_device() -> None:
    torch = pytest.importorskip("torch")
    for number in range(25):
        rng = np.random.default_rng(number)
        rows = [random_row(rng) for _ in range(40)]
        params, positions = [random_params(rng) for _ in rows], rng.integers(0, 99, len(rows)).tolist()
        found = pick_on_device([torch.from_numpy(row) for row in rows], params, positions)
        asked = zip(rows, params, positions, strict=True)
        assert found == [sample(row, each, at) if each.temperature else int(row.argmax()) for row, each, at in asked]


def test_a_large_batch_is_shared_among_threads_and_stays_in_order() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(0, 1, (101, 400)).astype(np.float32)
    rows[7, 5] = np.nan
    chooser = Chooser(DecodingParams(), VOCAB, 1)
    picked = choose_all([Question(chooser, row, toys.array([0])) for row in rows])
    assert isinstance(picked[7], EngineError)
    assert [token for at, token in enumerate(picked) if at != 7] == np.delete(rows, 7, 0).argmax(axis=1).tolist()
