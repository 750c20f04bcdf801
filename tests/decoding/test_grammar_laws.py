"""Speculation changes no text of a grammar, and tokens that have no rival cost the draft model nothing.

The vocabulary has all bytes, so that names of fields are forced; `test_laws` draws grammars where nothing is.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft import DecodingParams, Generation, generate, make_plan
from skydraft.choosing.chooser import Chooser
from skydraft.decoding.plan import Plan
from skydraft.engines.base import Engine
from skydraft.engines.toy import random_toy
from skydraft.gating.gates import CERTAIN
from tests import reference
from tests.grammars import BYTES, JSONS
from tests.toys import array, law

from . import test_laws as laws

pytest.importorskip("llguidance")
PROMPT = "12"
PROMPT_IDS = BYTES.encode(PROMPT)


def pair(seed: int, drift: float) -> tuple[Engine, Engine]:
    return random_toy(BYTES, seed=seed, drift=drift, drift_seed=seed + 7), random_toy(BYTES, seed=seed)


def decode(plan: Plan, params: DecodingParams, edge: Engine | None, cloud: Engine | None) -> Generation:
    return laws.decode(plan, params, edge, cloud, prompt=PROMPT)


def choice(engine: Engine, prefix: list[int], prompt_len: int, params: DecodingParams) -> int:
    """By a fresh sequence, matcher and chooser."""
    return Chooser(params, BYTES, prompt_len).choose(reference.row_after(engine, prefix), array(prefix))


@law(20)
@given(st.integers(0, 60), st.sampled_from([0.0, 0.3, 2.0]), st.sampled_from(JSONS), st.sampled_from([0.0, 0.8]),
       st.integers(1, 12), st.sampled_from(["entropy:1", "prob:0.5", "never"]))  # fmt: skip
def test_each_mode_is_its_model(seed: int, drift: float, grammar: str, temperature: float, k: int, gate: str) -> None:
    """Lossless is the target alone, and the edge alone is the draft model."""
    edge, cloud = pair(seed, drift)
    params = DecodingParams(grammar=grammar, temperature=temperature, seed=seed, max_new_tokens=30)
    alone, lossless = decode(make_plan("cloud"), params, None, cloud), decode(make_plan(k=k), params, edge, cloud)
    assert (alone.token_ids, alone.finish_reason) == (lossless.token_ids, lossless.finish_reason)
    here, gated = decode(make_plan("edge"), params, edge, None), decode(make_plan(gate=gate, k=k), params, edge, cloud)
    for done in (alone, here, gated):
        laws.assert_whose(done, edge, cloud, params, choice=choice)
        assert done.finish_reason == "eos" or len(done.token_ids) == 30


def test_forced_tokens_cost_no_forward_and_are_sure() -> None:
    params = DecodingParams(grammar='json_schema:{"const":"name and age, 我们"}', max_new_tokens=60)
    plan, (edge, _) = make_plan("edge"), pair(3, 0.2)
    done = generate(PROMPT, edge=edge, plan=plan, params=params, with_signals=True, raw=True).run()
    assert done.text == '"name and age, 我们"' and len(done.token_ids) > 10
    # Where it ends, there are two ends to choose from.
    assert sum(record.draft.num_passes for record in done.records) <= 2
    signals = [each for round_ in done.rounds_so_far for each in round_.block.signals]
    assert signals.count(CERTAIN) == len(signals) - 1 > 10


@law(20)
@given(st.integers(0, 60), st.sampled_from(JSONS), st.integers(1, 6), st.sampled_from(["", "+start"]))
def test_a_block_goes_on_as_long_as_tokens_are_forced(seed: int, grammar: str, k: int, start: str) -> None:
    """The first one, too, but where it ends sooner since the draft model is unsure."""
    edge, cloud = pair(seed, 0.3)
    params = DecodingParams(grammar=grammar, max_new_tokens=40)
    plan, chooser = make_plan(gate=f"entropy:1{start}", k=k), Chooser(params, BYTES, len(PROMPT_IDS))
    done = decode(plan, params, edge, cloud)
    for round_ in done.rounds_so_far[bool(start) :]:
        prefix = [*PROMPT_IDS, *done.token_ids[: round_.block.base], *round_.block.token_ids]
        if round_.block.token_ids and not round_.block.finish and len(round_.block.token_ids) < 32:
            assert chooser.forced(array(prefix)) is None and len(round_.block.free_signals) == k


@pytest.mark.parametrize("text", ["1111111111 2024年" * 3, ",,,,,, ,,,,,," * 4, "abababababab 3 3 3 3" * 3])
def test_a_forced_token_is_never_a_reason_to_ask_the_cloud(text: str) -> None:
    """Not as punctuation, as a cycle, as a digit or date; a block of nothing else is skipped whatever the threshold."""
    edge, cloud = pair(3, 0.2)
    params = DecodingParams(grammar=f'json_schema:{{"const":"{text}"}}', max_new_tokens=200)
    plan = make_plan(gate="prob:1+digits+dates", k=4)
    done = decode(plan, params, edge, cloud)
    assert done.text == f'"{text}"' and done.stats.num_forced_tokens >= len(text)
    # Where it ends, there are two ends to choose from, so the last block may be unsure; nothing else is a reason.
    assert {record.reason for record in done.records} <= {"", "uncertain"}
    free = decode(plan, DecodingParams(max_new_tokens=20), edge, cloud)
    assert free.stats.num_escalated > 1 and free.stats.num_forced_tokens == 0
