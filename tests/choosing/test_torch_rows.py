"""Rows may be numpy arrays or torch tensors: the same values give the same token and the same signals."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import numpy as np
import pytest

from skydraft.choosing.chooser import Chooser
from skydraft.config import DecodingParams
from skydraft.engines.toy import character_vocab
from skydraft.gating.gates import measure

from ..later import later

torch = later("torch")

VOCAB = character_vocab("今天天气很好我们去公园走，。员在的一是")
HALVES = ["bfloat16", "float16"]


def random_params(rng: np.random.Generator) -> DecodingParams:
    return DecodingParams(
        temperature=float(rng.choice([0, 0.7, 1.3])),
        top_k=int(rng.choice([0, 0, 1, 5, 40, 10_000])),
        top_p=float(rng.choice([1, 0.95, 0.5, 1e-9])),
        min_p=float(rng.choice([0, 0, 0.05, 1])),
        repetition_penalty=float(rng.choice([1, 1.1, 1.7, 0.8])),
        no_repeat_ngram_size=int(rng.choice([0, 1, 2, 3])),
        frequency_penalty=float(rng.choice([0, 0, 0.7, -1.3])),
        presence_penalty=float(rng.choice([0, 0, 1.1])),
        logit_bias=((3, float(rng.choice([-100, 2.5]))),),
        content_penalty=float(rng.choice([1, 1.22])),
        full_stop_gap=int(rng.choice([0, 8])),
        min_new_tokens=int(rng.choice([0, 100])),
        seed=int(rng.integers(0, 2**63)),
    )


def random_case(seed: int) -> tuple[Any, np.ndarray, Chooser]:
    """A row [vocab] float32, a read-only prefix as a sequence hands it out, and a chooser."""
    rng = np.random.default_rng(seed)
    row = rng.normal(0, rng.choice([0.1, 3, 30]), VOCAB.size).astype(np.float32)
    if seed % 3 == 0:
        row = np.round(row)  # many equal logits
    prefix = rng.integers(0, 40, rng.integers(1, 60)).astype(np.int32)
    prefix.flags.writeable = False
    return row, prefix, Chooser(random_params(rng), VOCAB, prompt_len=1)


def test_a_torch_row_gives_the_token_of_the_same_numpy_row() -> None:
    tokens = set()
    for seed in range(1500):
        row, prefix, chooser = random_case(seed)
        tensor = torch.from_numpy(row.copy())
        token_id = chooser.choose(row, prefix)
        assert chooser.choose(tensor, prefix) == token_id, seed
        assert chooser.rank(tensor, prefix, 7) == chooser.rank(row, prefix, 7), seed
        assert np.array_equal(tensor.numpy(), row), "choose must not change the row"
        tokens.add(token_id)
    assert len(tokens) > 100


@pytest.mark.parametrize("dtype", HALVES)
def test_a_half_precision_row_gives_the_token_of_its_float32_copy(dtype: str) -> None:
    for seed in range(800):
        row, prefix, chooser = random_case(seed)
        half = torch.from_numpy(row).to(getattr(torch, dtype))
        token_id = chooser.choose(half.float().numpy(), prefix)
        assert chooser.choose(half, prefix) == token_id, seed
        if dtype == "float16":
            assert chooser.choose(half.numpy(), prefix) == token_id, seed


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
@pytest.mark.parametrize("size", [300, 152_000])
def test_signals_agree_and_leave_the_row_alone(dtype: str, size: int) -> None:
    rng = np.random.default_rng(0)
    for scale in [0.01, 1, 3, 30] * (1 if size > 1000 else 25):
        tensor = torch.from_numpy(rng.normal(0, scale, size).astype(np.float32)).to(getattr(torch, dtype))
        before, exact = tensor.clone(), tensor.double().numpy()
        expected = exact_signals(exact)
        for row in (tensor, tensor.float(), tensor.float().numpy()):
            assert astuple(measure(row)) == pytest.approx(expected, abs=1e-5)
        assert torch.equal(tensor, before)


def exact_signals(row: np.ndarray) -> tuple[float, float, float]:
    """Entropy, margin and top probability by their definitions, in float64."""
    probs = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    present = probs[probs > 0]
    second, first = np.sort(probs)[-2:]
    return float(-(present * np.log(present)).sum()), float(first - second), float(first)


def test_rows_made_in_inference_mode_can_be_used_outside_of_it() -> None:
    row, prefix, _ = random_case(1)
    chooser = Chooser(DecodingParams(repetition_penalty=1.2, no_repeat_ngram_size=1), VOCAB, prompt_len=1)
    with torch.inference_mode():
        inside = torch.from_numpy(row.copy()) + 0
    assert chooser.choose(inside, prefix) == chooser.choose(row, prefix)
    assert measure(inside) == measure(torch.from_numpy(row))
