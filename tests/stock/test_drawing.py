"""At a temperature above 0 a server without skydraft gives tokens of the target's own distribution."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

import skydraft
from skydraft import DecodingParams, make_plan

from .. import toys
from ..toys import PROMPT, PROMPT_IDS
from .fakes import fake

NUM_SEEDS = 250 * int(os.environ.get("SKYDRAFT_EXAMPLES", "1"))  # 2,000 in make test-long
TEMPERATURE = 0.8
MODEL = 104  # 0.42 of its first tokens end within a character: a llama-server does not tell these in a stream


@pytest.fixture(scope="module", params=["vllm", "llama-server"])
def cloud(request: pytest.FixtureRequest) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, fake(request.param, engine=toys.toy(MODEL)) as server:
        patch.setattr("skydraft.edge.stock.connection.SAMPLE", PROMPT)
        with closing(skydraft.connect(server.url, require=True)) as cloud:
            yield cloud


def expected(top_k: int, top_p: float) -> Any:
    """The probability of each first token, [vocab]."""
    with closing(toys.toy(MODEL).open(list(PROMPT_IDS))) as sequence:
        row = np.asarray(sequence.extend(PROMPT_IDS[-1:])[-1], float)
    if top_k:
        row = np.where(row >= np.sort(row)[-top_k], row, -np.inf)
    weights = np.exp((row - row.max()) / TEMPERATURE)
    order = np.argsort(-weights, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= top_p * weights.sum()]] = 0.0
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(20, 1.0), (0, 1.0), (0, 0.6)], ids=["drawn here", "drawn there", "cut there"]
)
def test_tokens_have_the_targets_distribution(cloud: Any, top_k: int, top_p: float) -> None:
    edge, plan = toys.toy(MODEL, 0.7), make_plan(gate="always", k=3)
    seen: Counter[int] = Counter()
    for seed in range(NUM_SEEDS):
        params = DecodingParams(max_new_tokens=1, temperature=TEMPERATURE, top_k=top_k, top_p=top_p, seed=seed)
        done = skydraft.generate(
            PROMPT, edge=edge, cloud=cloud, plan=plan, params=params, raw=True, execution="throughput"
        ).run()
        seen[done.token_ids[0]] += 1
    chances = expected(top_k, top_p)
    order = np.argsort(chances)[::-1]
    often = [token for token in order if chances[token] * NUM_SEEDS >= 5]
    counts = [seen[int(token)] for token in often] + [NUM_SEEDS - sum(seen[int(token)] for token in often)]
    wanted = [chances[token] * NUM_SEEDS for token in often] + [(1 - chances[often].sum()) * NUM_SEEDS]
    if wanted[-1] < 1e-6:
        assert counts.pop() == 0
        wanted.pop()
    assert chisquare(counts, np.array(wanted) * sum(counts) / sum(wanted)).pvalue > 1e-4
