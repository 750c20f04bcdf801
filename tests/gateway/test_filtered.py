"""A text that a hosted model's filter ended: each interface says so in its own word, with what was written before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx2 as httpx
import pytest

import skydraft
from skydraft.gateway.pair import Pair
from tests.hostile.texts import DRAFT, TARGET, TEXT
from tests.stock.fakes import GENERATING, Fake, fake
from tests.stock.test_endings import FILTERS, REFUSED

from .running import Running, gateway
from .test_messages import events_of

MODES = ("skydraft-cloud", "skydraft-lossless")


@pytest.fixture(scope="module")
def hosted() -> Iterator[tuple[Running, Fake]]:
    with (
        fake("vllm", TARGET) as server,
        closing(skydraft.connect(server.url, api="chat", model="toy", timeout_s=20)) as cloud,
        gateway(Pair(DRAFT, cloud)) as running,
    ):
        post(running, "messages", MODES[0], messages=[{"role": "user", "content": TEXT}])  # so that all is known of it
        yield running, server


@pytest.fixture(params=["after some text", "at once"])
def filtered(hosted: tuple[Running, Fake], request: pytest.FixtureRequest) -> Iterator[tuple[Running, bool]]:
    """The gateway, and whether text comes before the filter ends it."""
    running, server = hosted
    fault = {"after some text": FILTERS["Zhipu: sensitive"], "at once": REFUSED["Azure"]}[request.param]
    server.fault_of = lambda path: fault if path in GENERATING else None
    yield running, request.param == "after some text"
    server.fault_of = lambda path: None


def post(running: Running, path: str, model: str, **body: Any) -> httpx.Response:
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    given = {"model": model, limit: 40, "temperature": 0} | body
    return httpx.post(f"{running.v1}/{path}", json=given, timeout=30).raise_for_status()


def data_of(reply: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("model", MODES)
def test_chat_completions(filtered: tuple[Running, bool], model: str) -> None:
    running, has_text = filtered
    asked = {"messages": [{"role": "user", "content": TEXT}]}
    (choice,) = post(running, "chat/completions", model, **asked).json()["choices"]
    assert choice["finish_reason"] == "content_filter" and bool(choice["message"]["content"]) == has_text
    chunks = data_of(post(running, "chat/completions", model, **asked, stream=True))
    assert chunks[-1]["choices"][0]["finish_reason"] == "content_filter"
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == (choice["message"]["content"] or "")


@pytest.mark.parametrize("model", MODES)
def test_responses(filtered: tuple[Running, bool], model: str) -> None:
    running, has_text = filtered
    for response in (
        post(running, "responses", model, input=TEXT).json(),
        data_of(post(running, "responses", model, input=TEXT, stream=True))[-1]["response"],
    ):
        assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "content_filter"}
        (item,) = response["output"]
        assert item["status"] == "incomplete" and bool(item["content"][0]["text"]) == has_text


@pytest.mark.parametrize("model", MODES)
def test_messages(filtered: tuple[Running, bool], model: str) -> None:
    running, has_text = filtered
    asked = {"messages": [{"role": "user", "content": TEXT}]}
    whole = post(running, "messages", model, **asked).json()
    assert (whole["stop_reason"], whole["stop_sequence"], bool(whole["content"])) == ("refusal", None, has_text)
    events = events_of(post(running, "messages", model, **asked, stream=True))
    assert events[-2]["delta"]["stop_reason"] == "refusal"


def test_completions() -> None:
    """A chat server is given no bare text, so this one takes completions."""
    with (
        fake("completions", TARGET) as server,
        closing(skydraft.connect(server.url, api="completions", model="toy", timeout_s=20)) as cloud,
        gateway(Pair(DRAFT, cloud)) as running,
    ):
        server.fault_of = lambda path: FILTERS["Zhipu: sensitive"] if path in GENERATING else None
        (choice,) = post(running, "completions", "skydraft-cloud", prompt=TEXT).json()["choices"]
        assert choice["finish_reason"] == "content_filter" and choice["text"]
        chunks = data_of(post(running, "completions", "skydraft-cloud", prompt=TEXT, stream=True))
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "content_filter"
