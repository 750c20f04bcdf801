"""At a temperature above 0 a server without skydraft gives tokens of the target's own distribution."""

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import skydraft
from skydraft import DecodingParams, make_plan

from .. import reference, toys
from ..choosing.test_distribution import SIGNIFICANCE, p_value
from ..toys import PROMPT, PROMPT_IDS, VOCAB
from .fakes import fake

NUM_SEEDS = 200 * int(os.environ.get("SKYDRAFT_EXAMPLES", "1"))  # 1,600 in make test-long
TEMPERATURE = 0.8
MODEL = 104  # 0.42 of its first tokens end within a character: a llama-server does not tell these in a stream


@pytest.fixture
def cloud(dialect: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("skydraft.edge.stock.connection.SAMPLE", PROMPT)
    with fake(dialect, engine=toys.toy(MODEL)) as server, closing(skydraft.connect(server.url, require=True)) as cloud:
        yield cloud


@pytest.mark.parametrize(("dialect", "top_k", "top_p"), [("vllm", 0, 1.0), ("llama-server", 20, 0.6)])
def test_tokens_have_the_targets_distribution(cloud: Any, top_k: int, top_p: float) -> None:
    edge, plan = toys.toy(MODEL, 0.7), make_plan(gate="always", k=3)
    counts, warping = np.zeros(VOCAB.size), DecodingParams(temperature=TEMPERATURE, top_k=top_k, top_p=top_p)
    for seed in range(NUM_SEEDS):
        params = replace(warping, max_new_tokens=1, seed=seed)
        done = skydraft.generate(
            PROMPT, edge=edge, cloud=cloud, plan=plan, params=params, raw=True, execution="throughput"
        ).run()
        counts[done.token_ids[0]] += 1
    row = reference.row_after(toys.toy(MODEL), PROMPT_IDS)
    assert p_value(counts, reference.probabilities(reference.warped(row, warping))) > SIGNIFICANCE
