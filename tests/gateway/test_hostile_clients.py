"""Clients that send deep bodies, and keys that would have the gateway for themselves."""

import asyncio
import threading
from unittest.mock import Mock

import httpx2 as httpx
import pytest

from skydraft import DecodingParams, api, make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.errors import TargetChanged
from skydraft.gateway.desk import Desk, Ended
from skydraft.gateway.refusals import Refusal
from skydraft.prompts.messages import asked

from ..gateway.running import Running, gateway, toy_pair
from ..serving import PATIENCE_S, waiting


def test_one_key_leaves_places_and_turns_to_the_others() -> None:
    pair, go = toy_pair(), threading.Event()
    waiting(pair.edge, lambda: go.wait(PATIENCE_S))
    request = GenerateRequest(asked("a"), make_plan("edge"), DecodingParams(max_new_tokens=1))

    async def hogged() -> None:
        desk = Desk(pair, 3, 29, has_keys=True)
        with pytest.raises(Refusal):
            for _ in range(9):
                desk.submit([request] * 4, "eve")
        assert desk.num_running == 2 and desk.num_waiting <= 18  # whose answers may never end
        _, events = desk.submit([request] * 8, "ann")
        assert desk.num_running == 3
        go.set()
        ended = 0
        while ended < 8:
            ended += isinstance((await asyncio.wait_for(events.get(), PATIENCE_S))[1], Ended)
        desk.close()

    asyncio.run(hogged())


@pytest.mark.parametrize("depth", [100, 990, 50_000])
@pytest.mark.parametrize("inner", ['"\\u0041"', "1"])
def test_depth_is_no_failure_of_the_gateway(served: Running, depth: int, inner: str) -> None:
    deep = '{"a":' * depth + inner + "}" * depth
    asks = '{"model":"skydraft-edge","max_tokens":2,"messages":[{"role":"user","content":"x"}],"tools":[' + deep + "]}"
    reply = httpx.post(f"{served.v1}/chat/completions", content=asks, timeout=30)
    assert reply.status_code in (200, 400) and served.chat().status_code == 200


def test_servers_that_differ_are_an_error_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = TargetChanged("One of the servers runs another model.")
    monkeypatch.setattr(api, "is_calibrated", Mock(side_effect=changed))
    with gateway() as running:
        reply = httpx.get(f"{running.v1}/models")
        assert reply.status_code == 503 and "another model" in reply.json()["error"]["message"]
        assert httpx.get(f"{running.url}/health").status_code == running.chat().status_code == 200
