"""A device drafts for a vLLM: the text is what vLLM writes, in fewer steps, and nothing that fails loses a token."""

from contextlib import closing
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, make_plan
from tests import toys
from tests.stock.conftest import SEED
from tests.stock.drafting import drafting_vllm

PARAMS = DecodingParams(max_new_tokens=120, min_new_tokens=120)
STEP_S = 0.02


@pytest.fixture(autouse=True)
def on_any_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYDRAFT_DRAFTS_PORT", "0")
    monkeypatch.setattr("skydraft.edge.stock.connection.SAMPLE", toys.PROMPT)


def written(edge: Any, cloud: Any, params: DecodingParams = PARAMS) -> skydraft.Generation:
    return skydraft.generate(toys.PROMPT, edge=edge, cloud=cloud, plan=make_plan(), params=params, raw=True).run()


@pytest.fixture(scope="module")
def alone() -> tuple[int, ...]:
    target = toys.toy(SEED)
    plan = make_plan("cloud")
    return skydraft.generate(toys.PROMPT, cloud=target, plan=plan, params=PARAMS, raw=True).run().token_ids


@pytest.mark.parametrize("tells_names", [True, False])
@pytest.mark.parametrize(("drift", "most"), [(0.0, 0.6), (0.2, 0.9), (9.0, 1.0)])
def test_a_text_takes_fewer_steps_and_is_the_same(
    alone: tuple[int, ...], drift: float, most: float, tells_names: bool
) -> None:
    edge = toys.toy(SEED, drift)
    with (
        drafting_vllm(toys.toy(SEED), token_s=STEP_S, tells_names=tells_names) as (server, dialect, address),
        closing(skydraft.connect(server.url, drafts=address, require=True)) as cloud,
    ):
        for _ in range(2):  # the first text may begin before the connection is there
            dialect.forwards = 0
            done = written(edge, cloud)
            assert done.token_ids == alone
        assert dialect.forwards <= most * len(alone) + 1
        accepted = done.origins.count("accepted")
        assert accepted <= len(alone) - dialect.forwards + 1 and (drift > 1 or accepted > 10)
        assert sum(record.target.num_passes for record in done.records) >= dialect.forwards - 1
