"""A server without skydraft gives what its model gives in this process, whatever the gate, the draft and the seed; at a
temperature above 0, tokens of its model's own distribution."""

import os
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.engines.toy import open_toy

from .. import reference, toys
from ..choosing.test_distribution import SIGNIFICANCE, p_value
from ..decoding.test_laws import decode as decoded
from ..edge.test_remote import gates
from ..toys import PROMPT, PROMPT_IDS, VOCAB, law
from .conftest import SEED
from .fakes import IDS, fake

plans = st.builds(
    lambda gate, k, back: make_plan(gate=gate, k=k, hand_back=back),
    gates, st.integers(1, 12), st.sampled_from(["0", "1", "4", "text"]),
)  # fmt: skip


decode = partial(decoded, execution="throughput")

ids = st.integers(0, len(toys.PIECES) - 1) | st.just(toys.EOS)  # else a text seldom ends by itself
FOLLOWED = {
    "logit_bias": st.dictionaries(ids, st.floats(-50, 50), max_size=3).map(lambda found: tuple(sorted(found.items()))),
    "repetition_penalty": st.floats(0.5, 2), "min_new_tokens": st.integers(1, 20),
    "frequency_penalty": st.floats(-2, 2), "presence_penalty": st.floats(-2, 2),
}  # fmt: skip
COUNTED = ("frequency_penalty", "presence_penalty")
NOT_THERE = {"vllm": (), "sglang": ("repetition_penalty",), "llama-server": ("min_new_tokens", *COUNTED)}


@law(200)
@given(st.sampled_from(IDS), st.sampled_from(toys.DRAFTERS), st.integers(1, 24), st.none() | plans, st.data())
def test_a_stock_server_is_local(
    clouds: dict[str, Any], dialect: str, drafter: Any, length: int, plan: Any, data: st.DataObject
) -> None:
    """Also with what changes the target's choices, which the server does by itself. Penalties that count what was
    written are for streams, since each request would count anew."""
    there = [each for each in FOLLOWED if each not in NOT_THERE[dialect] and not (plan and each in COUNTED)]
    chosen = {each: data.draw(FOLLOWED[each]) for each in there if data.draw(st.booleans())}
    if "repetition_penalty" in chosen:
        chosen.pop("logit_bias", None)  # which servers add before this penalty, and skydraft serve after it
    params, plan = DecodingParams(max_new_tokens=length, **chosen), plan or make_plan("cloud")
    edge = toys.toy(SEED, drafter[0], sign=drafter[1])
    far, near = (decode(plan, params, edge, target) for target in (clouds[dialect], toys.toy(SEED)))
    assert far.token_ids == near.token_ids
    assert (far.origins, far.finish_reason, far.text) == (near.origins, near.finish_reason, near.text)
    said = [[(r.base, r.num_draft, r.num_accepted, r.outcome) for r in each.records] for each in (far, near)]
    assert said[0] == said[1] or not plan.drafts


NUM_SEEDS = 200 * int(os.environ.get("SKYDRAFT_EXAMPLES", "1"))  # 1,600 in make test-long
MODEL = 104  # 0.42 of its first tokens end within a character: a llama-server does not tell these in a stream


@pytest.mark.parametrize(("dialect", "top_k", "top_p"), [("vllm", 0, 1.0), ("llama-server", 20, 0.6)])
def test_tokens_have_the_targets_distribution(
    dialect: str, top_k: int, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skydraft.edge.stock.connection.SAMPLE", PROMPT)
    edge, plan = toys.toy(MODEL, 0.7), make_plan(gate="always", k=3)
    counts, warping = np.zeros(VOCAB.size), DecodingParams(temperature=0.8, top_k=top_k, top_p=top_p)
    with fake(dialect, engine=toys.toy(MODEL)) as server, closing(skydraft.connect(server.url, require=True)) as cloud:
        for seed in range(NUM_SEEDS):
            params = DecodingParams(temperature=0.8, top_k=top_k, top_p=top_p, max_new_tokens=1, seed=seed)
            counts[decode(plan, params, edge, cloud).token_ids[0]] += 1
    row = reference.row_after(toys.toy(MODEL), PROMPT_IDS)
    assert p_value(counts, reference.probabilities(reference.warped(row, warping))) > SIGNIFICANCE


@pytest.mark.parametrize("dialect", IDS)
@pytest.mark.parametrize("drift", [0.0, 0.7])
def test_lossless_asks_a_stock_server_what_cloud_asks(clouds: dict[str, Any], dialect: str, drift: float) -> None:
    params, edge = DecodingParams(max_new_tokens=40), toys.toy(SEED, drift)
    done, alone = (decoded(make_plan(mode), params, edge, clouds[dialect]) for mode in ("lossless", "cloud"))
    assert done.token_ids == alone.token_ids and set(done.origins) == {"cloud"}
    assert done.stats.num_requests == alone.stats.num_requests and not any(each.num_draft for each in done.records)


@pytest.mark.parametrize("is_gated", [False, True])
def test_a_text_ends_where_the_servers_context_does(is_gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gated one goes on alone: the server is first asked when skipped tokens are beyond its context."""
    if is_gated:
        late = lambda gate, generated, *_: "uncertain" if len(generated) > 70 else ""  # noqa: E731
        monkeypatch.setattr("skydraft.gating.gates.Gate.reason", late)
    plan = make_plan(gate="entropy:2", k=6, hand_back="0") if is_gated else make_plan("cloud")
    edge, params = open_toy("toy:drift=0.2"), DecodingParams(max_new_tokens=120)
    with fake("vllm", engine=open_toy("toy", 64, 8)) as server, closing(skydraft.connect(server.url)) as cloud:
        done = skydraft.generate("语速", edge=edge, cloud=cloud, plan=plan, params=params).run()
    length = 120 if is_gated else 64 - done.num_prompt_tokens
    assert (done.finish_reason, len(done.token_ids)) == ("length", length)
    assert set(done.origins[78:]) == ({"edge-fallback"} if is_gated else set())
