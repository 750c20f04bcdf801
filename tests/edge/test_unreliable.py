"""Whatever happens to single messages, no token is lost and none is doubled.

The link below loses requests, loses replies after the server has acted on them, sends twice, and sends old requests
again later: everything that a network between two programs can do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.cloud.server import ServeOptions
from skydraft.decoding.plan import Plan
from skydraft.edge.link import Link
from skydraft.errors import CloudLost, CloudTimeout, SkydraftError

from ..decoding import reference, toys
from ..decoding.toys import PROMPT, PROMPT_IDS, law
from ..serving import Serving

SEED = 4
FATES = ["pass", "pass", "pass", "lose request", "lose reply", "late reply", "twice", "old again", "forget", "restart"]


class UnreliableLink:
    """Stands in for Link.call: each call meets the next fate. Pings pass."""

    def __init__(self, link: Link, server: Serving, fates: list[str]) -> None:
        self._call = link.call
        self._server = server
        self._fates = iter(fates)
        self._sent: list[tuple[str, bytes]] = []

    def __call__(self, method: str, request: bytes, timeout_s: float, ping_s: float = 5.0) -> bytes:
        if method not in ("Verify", "Open"):
            return self._call(method, request, timeout_s)
        fate = next(self._fates, "pass")
        if fate == "lose request":
            raise CloudLost("lost on the way up")
        if fate == "old again" and self._sent:
            self._quietly(*self._sent[0])
        if fate == "forget":
            self._server.forget_sessions(keep_verdicts=False)
        if fate == "restart":  # other sessions under the same numbers are not there either
            self._server.forget_sessions(keep_verdicts=False)
            raise CloudLost("connection reset")
        self._sent.append((method, request))
        reply = self._call(method, request, timeout_s)
        if fate == "lose reply":
            raise CloudLost("lost on the way down")
        if fate == "late reply":
            raise CloudTimeout("too late")
        return self._call(method, request, timeout_s) if fate == "twice" else reply

    def _quietly(self, method: str, request: bytes) -> None:
        try:
            self._call(method, request, 1.0)
        except SkydraftError:
            return


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    running = Serving(toys.toy(SEED), ServeOptions(port=0))
    yield running
    running.stop()


def decode(
    server: Serving, plan: Plan, params: DecodingParams, edge: Any, fates: list[str], **options: Any
) -> Generation:
    cloud = skydraft.connect(server.address, **options)
    unreliable = UnreliableLink(cloud.link, server, fates)
    cloud.link.call = unreliable  # type: ignore[method-assign]
    cloud.link.call_watched = unreliable  # type: ignore[method-assign]
    cloud.link.start = lambda *_: None  # type: ignore[method-assign]  # Close never arrives
    try:
        return skydraft.generate(PROMPT, edge=edge, cloud=cloud, plan=plan, params=params, raw=True).run()
    finally:
        cloud.close()


fates = st.lists(st.sampled_from(FATES), max_size=12)


@law(250)
@given(st.sampled_from(toys.DRAFTERS), toys.params(), st.integers(1, 8), fates)
def test_lossless_over_an_unreliable_link_is_the_target(
    server: Serving, drafter: tuple[float, int], params: DecodingParams, k: int, fates: list[str]
) -> None:
    edge = toys.toy(SEED, drafter[0], sign=drafter[1])
    generation = decode(server, make_plan("lossless", k=k), params, edge, fates)
    assert (generation.token_ids, generation.finish_reason) == reference.plain(toys.toy(SEED), PROMPT_IDS, params)


@law(150)
@given(toys.params(), st.floats(0, 3), st.integers(1, 8), fates)
def test_a_gated_run_that_requires_the_cloud_is_the_undisturbed_one(
    server: Serving, params: DecodingParams, theta: float, k: int, fates: list[str]
) -> None:
    plan = make_plan(gate=f"entropy:{theta}", k=k)
    edge = toys.toy(SEED, 0.7)
    disturbed = decode(server, plan, params, edge, fates, require=True)
    calm = decode(server, plan, params, edge, [])
    assert disturbed.token_ids == calm.token_ids
    assert disturbed.origins == calm.origins
    assert [done.audit for done in disturbed._rounds] == [done.audit for done in calm._rounds]


@law(60)
@given(toys.params(), st.floats(0, 3), st.integers(1, 6), st.lists(st.sampled_from(["pass", "gone"]), max_size=8))
def test_tokens_of_a_run_that_falls_back_come_from_the_model_they_are_said_to_come_from(
    server: Serving, params: DecodingParams, theta: float, k: int, outages: list[str]
) -> None:
    edge, target = toys.toy(SEED, 0.7), toys.toy(SEED)
    cloud = skydraft.connect(server.address)
    plan = make_plan(gate=f"entropy:{theta}", k=k)
    generation = skydraft.generate(PROMPT, edge=edge, cloud=cloud, plan=plan, params=params, raw=True)
    verifier = generation._loop._verifier
    assert verifier is not None
    fate, verify = iter(outages), verifier.verify

    def flaky(block: Any, catch_up: Any) -> Any:
        verdict_first = len(block.token_ids) % 2  # half of the time the server has judged what the edge gave up
        if next(fate, "pass") == "gone":
            if verdict_first:
                verify(block, catch_up)
            raise CloudLost("gone")
        return verify(block, catch_up)

    verifier.verify = flaky  # type: ignore[method-assign]
    generation.run()
    token_ids = [*PROMPT_IDS, *generation.token_ids]
    for index, origin in enumerate(generation.origins):
        model = edge if origin in ("skipped", "edge-fallback") else target
        prefix = token_ids[: len(PROMPT_IDS) + index]
        assert token_ids[len(prefix)] == reference.next_token(model, prefix, len(PROMPT_IDS), params)
    num_fallback = sum(record.outcome == "fallback" for record in generation.records)
    assert num_fallback == outages[: generation.stats.num_escalated + num_fallback].count("gone")
    assert generation.stats.num_fallback_tokens == generation.origins.count("edge-fallback")
    cloud.close()


@pytest.mark.parametrize("broken", ["digest", "base"])
def test_a_divergence_is_noticed_in_its_round_and_mended(server: Serving, broken: str) -> None:
    params = DecodingParams(max_new_tokens=24, min_new_tokens=24)
    lines: list[str] = []
    cloud = skydraft.connect(server.address, notify=lines.append)
    generation = skydraft.generate(PROMPT, edge=toys.toy(SEED, 0.7), cloud=cloud, params=params, raw=True)
    rounds = generation.rounds()
    for _ in range(3):
        next(rounds)
    session = list(server.sessions._table.values())[-1]
    context = session.target._context
    if broken == "digest":
        context._tokens._store[len(context) - 2] += 1  # the server's copy changes under it
    else:
        context._tokens.truncate(len(context) - 1)
    for _ in rounds:
        pass
    assert (generation.token_ids, generation.finish_reason) == reference.plain(toys.toy(SEED), PROMPT_IDS, params)
    assert any("different tokens" in line for line in lines) == (broken == "digest")
    cloud.close()
