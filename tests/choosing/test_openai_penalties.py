"""Frequency penalty, presence penalty and logit bias as OpenAI's interface defines them, by the formula itself.

    mu[j] -> mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence, then + bias[j]

where mu[j] is the logit of token j and c[j] how often it was sampled before (OpenAI, API reference, "frequency and
presence penalties").
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, decoding_params, make_plan
from skydraft.choosing.chooser import Chooser
from skydraft.errors import OptionError
from tests import toys
from tests.toys import VOCAB, law

tokens = st.integers(0, VOCAB.size - 1)
amounts = st.floats(-2, 2)
biases = st.dictionaries(tokens, st.floats(-100, 100), max_size=6)


@law(500)
@given(st.integers(0, 9999), st.lists(tokens, max_size=30), st.lists(tokens, max_size=5), amounts, amounts, biases)
def test_the_logits_are_those_of_the_formula(
    seed: int, generated: list[int], prompt: list[int], frequency: float, presence: float, bias: dict[int, float]
) -> None:
    params = decoding_params(frequency_penalty=frequency, presence_penalty=presence, logit_bias=bias.items())
    row = np.random.default_rng(seed).normal(0, 5, VOCAB.size).astype(np.float32)
    prefix = np.array([*prompt, *generated], np.int32)
    got = Chooser(params, VOCAB, len(prompt)).constrain(row, prefix)
    count = [generated.count(j) for j in range(VOCAB.size)]  # the prompt was not sampled
    expected = [
        float(row[j]) - count[j] * frequency - float(count[j] > 0) * presence + bias.get(j, 0.0)
        for j in range(VOCAB.size)
    ]
    assert np.allclose(got, expected, rtol=1e-5, atol=1e-4)


PENALTIES = [
    {"frequency_penalty": 1.3}, {"presence_penalty": 1.9}, {"frequency_penalty": -1.9, "presence_penalty": 0.4},
    {"logit_bias": {3: 60.0, 7: -100.0}.items()}, {"frequency_penalty": 0.9, "logit_bias": {4: 5.5}.items()},
]  # fmt: skip


@pytest.mark.parametrize("options", PENALTIES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_lossless_with_them_is_the_target_with_them(options: Any, temperature: float) -> None:
    params = decoding_params(temperature=temperature, seed=4, max_new_tokens=40, **options)
    edge, cloud = toys.toy(3, 0.4), toys.toy(3)

    def tokens_of(mode: str, chosen: DecodingParams) -> tuple[int, ...]:
        plan = make_plan(mode)
        return (
            skydraft.generate(toys.PROMPT, edge=edge, cloud=cloud, plan=plan, params=chosen, raw=True).run().token_ids
        )

    assert tokens_of("lossless", params) == tokens_of("cloud", params)
    without = decoding_params(temperature=temperature, seed=4, max_new_tokens=40)
    assert tokens_of("cloud", params) != tokens_of("cloud", without)  # they do something


@pytest.mark.parametrize(
    "wrong",
    [
        {"frequency_penalty": 2.1}, {"presence_penalty": float("nan")}, {"logit_bias": [(3, 101.0)]},
        {"logit_bias": [(-1, 1.0)]}, {"logit_bias": [(3, 1.0), (3, 2.0)]},
    ],
)  # fmt: skip
def test_what_lies_outside_their_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        decoding_params(**wrong)


def test_a_bias_of_an_id_that_is_no_token_is_refused() -> None:
    with pytest.raises(OptionError, match="has no id"):
        Chooser(decoding_params(logit_bias=[(VOCAB.size, 1.0)]), VOCAB, 1)
