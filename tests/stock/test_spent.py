"""What a gateway's answers have cost: told with each answer, in the sum of the day, and refused beyond the limit."""

from contextlib import AbstractContextManager
from typing import Any

import httpx2 as httpx
import pytest

import skydraft
from skydraft.engines.toy import open_toy
from skydraft.types import LinkCost
from tests.gateway.interfaces import events_of, plain
from tests.gateway.running import Running
from tests.gateway.running import over as gateway_over
from tests.hostile.texts import DRAFT, TARGET
from tests.serving import serving
from tests.stock.fakes import fake
from tests.stock.test_money import PRICES

PATHS = ("chat/completions", "completions", "responses", "messages")


def over(address: str, **how: Any) -> AbstractContextManager[Running]:
    return gateway_over(skydraft.connect(address, **how), DRAFT, max_running=3)


def post(running: Running, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{running.v1}/{path}", json=plain(path, "语速") | body, timeout=30.0)


def spent(running: Running) -> LinkCost:
    return running.gateway.pair.far.spent  # type: ignore[union-attr]


@pytest.mark.parametrize("path", PATHS[:3])
def test_usage_by_model_is_whole_and_streamed_the_same(path: str) -> None:
    """Its tokens are those of the answer, and all usages are what was spent, over a server of ours too."""
    gate = {"gate": "entropy:0.3", "k": 2, "hand_back": "0"}
    with fake("vllm", TARGET) as stock, serving(open_toy("toy")) as server:
        for address, how in ((stock.url, {"price": "1,2,3"}), (server.address, {})):
            with over(address, **how) as running:
                for model in ("skydraft-quality", "skydraft-cloud", "skydraft-edge"):
                    before = spent(running)
                    body = {"model": model, "skydraft": gate if model == "skydraft-quality" else {}}
                    whole = post(running, path, **body).json()
                    events = events_of(post(running, path, stream=True, **body).text)
                    last = next(
                        ours["usage"] for each in events
                        if "usage" in (ours := each.get("response", each).get("skydraft", {}))
                    )  # fmt: skip
                    ours, num = whole["skydraft"]["usage"], len(whole["skydraft"]["origins"])
                    parts = [each[side]["completion_tokens"] for each in (ours, last) for side in ("edge", "cloud")]
                    assert parts[:2] == parts[2:] and sum(parts[:2]) == num
                    assert (parts[0] > 0, parts[1] > 0) == (model != "skydraft-cloud", model != "skydraft-edge")
                    # A text at a server of ours pays when it is closed, which may be a moment after its answer.
                    told = ours["cloud"]["tokens_out"] + last["cloud"]["tokens_out"]
                    least = before.tokens_out + (0 if how else told)
                    running.wait_until(lambda least=least: spent(running).tokens_out >= least)
                    now = spent(running) - before
                    for name in ("tokens_in", "tokens_hit", "tokens_out"):
                        told = ours["cloud"][name] + last["cloud"][name]
                        assert told == getattr(now, name) or (how and told <= getattr(now, name))
                    assert (now.tokens_in > 0 and now.tokens_out > 0) == (model != "skydraft-edge")
                    if how:
                        cloud = ours["cloud"]
                        read = cloud["tokens_in"] - cloud["tokens_hit"]
                        assert cloud["cost"] == PRICES.total(cloud["tokens_hit"], read, cloud["tokens_out"])
                    assert ours["edge"]["cost"] == 0 and (ours["cloud"]["cost"] is None) == (not how)
                metrics = httpx.get(f"{running.url}/metrics").text
                assert f'cloud_tokens{{kind="in"}} {float(spent(running).tokens_in)}' in metrics
                assert ("skydraft_gateway_cloud_cost " in metrics) == bool(how)


def test_a_gateway_that_has_spent_its_day_goes_on_without_the_cloud() -> None:
    """What needs it is refused."""
    with fake("vllm", TARGET) as server, over(server.url, price="1,2,3", max_cost=2e-5) as running:
        replies = [post(running, "completions", model="skydraft-cloud") for _ in range(30)]
        assert (replies[0].status_code, replies[-1].status_code) == (200, 429)
        num_asked = len(server.generating)
        for path in PATHS:
            for stream in (False, True):
                reply = post(running, path, stream=stream, model="skydraft-cloud")
                error = reply.json()["error"]
                assert reply.status_code == 429 and "Today's requests have cost" in error["message"]
                assert error["type"] == "rate_limit_error"
                assert error.get("code", "insufficient_quota") == "insufficient_quota"
                assert reply.headers["x-should-retry"] == "false"
                assert 0 < int(reply.headers["retry-after"]) <= 86400
        ours = post(running, "completions", model="skydraft-lossless").json()["skydraft"]
        assert ours["receipt"]["calls"] == 0 and ours["usage"]["cloud"]["completion_tokens"] == 0
        events = events_of(post(running, "completions", model="skydraft-lossless", stream=True).text)
        notices = [each["skydraft"]["notice"] for each in events if "notice" in each.get("skydraft", {})]
        assert any("max-cost" in line for line in notices) or "edge-fallback" not in ours["origins"]
        assert len(server.generating) == num_asked
