"""What changes the target's choices holds at a server without skydraft, too: the text is that of the target here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, make_plan

from .. import toys
from ..toys import PROMPT, law
from .fakes import fake
from .test_laws import DIALECTS, SEED, decode, plans

constrained = st.builds(
    lambda params, top_k: replace(
        params, top_k=top_k, min_call_prob=0.0, repetition_penalty=1.0, content_penalty=1.0
    ),
    toys.params(), st.integers(1, 20),
)  # fmt: skip


@pytest.fixture(scope="module")
def clouds() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr("skydraft.edge.stock.connection.SAMPLE", PROMPT)
        servers = {dialect: stack.enter_context(fake(dialect, engine=toys.toy(SEED))) for dialect in DIALECTS}
        yield {
            dialect: (server, stack.enter_context(closing(skydraft.connect(server.url, require=True))))
            for dialect, server in servers.items()
        }


def restricted(server: Any, begun: int) -> int:
    """How many requests said which tokens may come."""
    bodies = [asked.body or {} for asked in server.model.asked[begun:]]
    return sum(bool({"logit_bias", "allowed_token_ids"} & {*body, *body.get("sampling_params", {})}) for body in bodies)


@law(150)
@given(st.sampled_from(DIALECTS), st.sampled_from(toys.DRAFTERS), constrained, plans, st.sampled_from([2, 20]))
def test_a_constrained_text_is_local(
    clouds: dict[str, Any], dialect: str, drafter: tuple[float, int], params: DecodingParams, plan: Any, num_best: int
) -> None:
    """Also where the best tokens of a server are so few that none of them is allowed, or another one might win."""
    server, cloud = clouds[dialect]
    edge, begun = toys.toy(SEED, drafter[0], sign=drafter[1]), len(server.model.asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skydraft.edge.stock.choices.MAX_BEST", 20 if params.temperature else num_best)
        far = decode(plan, params, edge, cloud)
    near = decode(plan, params, edge, toys.toy(SEED))
    if params.temperature and restricted(server, begun):
        return  # the server has drawn one of these, with numbers of its own
    assert far.token_ids == near.token_ids
    assert (far.origins, far.finish_reason, far.text) == (near.origins, near.finish_reason, near.text)
