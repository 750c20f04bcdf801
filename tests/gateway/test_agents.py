"""Coding agents: what they sent is answered, too long a prompt is told as they understand it, and waiting is shown."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from .interfaces import call_text, events_of, plain
from .running import gateway, scripted_pair, toy_pair

RECORDED = sorted((Path(__file__).parent / "agents").glob("*.json"))
TELLS = {"/v1/messages": '"thinking":"hm', "/v1/responses": '"reasoning_text"',
         "/v1/chat/completions": '"reasoning_content":"hm'}  # fmt: skip


def filled(value: Any) -> Any:
    """A recorded body with its long texts, which are made up."""
    if isinstance(value, dict):
        return "lorem ipsum " * (value["$text"] // 12) if "$text" in value else {k: filled(v) for k, v in value.items()}
    return [filled(each) for each in value] if isinstance(value, list) else value


def recorded(path: Path) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = json.loads(path.read_text())
    for each in asked:
        same = {name: asked[0]["body"][name] for name in each["body"] if each["body"][name] == {"$same": name}}
        each["body"] = filled(each["body"] | same)
        each["headers"] = each["headers"] or asked[0]["headers"]
    return asked


@pytest.mark.parametrize("thought", ["", "hm, <tool_call>?"], ids=["plain", "thinking"])
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_what_agents_sent_is_answered(path: Path, thought: str) -> None:
    """The first request and one with the results of tools, as they came, and whole where a stream was wanted."""
    asked = recorded(path)
    tools = asked[0]["body"].get("tools") or []
    name = next((tool.get("name") or tool["function"]["name"] for tool in tools), "")
    steps = [call_text(name, {"a": "é"}), "done"] if name else ["done"]
    with gateway(scripted_pair(steps, 400_000, thought)) as served:
        for number, each in enumerate(asked):
            for stream in (True, False):
                answer = served.client.post(
                    served.url + each["path"], headers=each["headers"], json=each["body"] | {"stream": stream}
                )
                assert answer.status_code == 200, answer.text
                wanted = (f'"name":"{name}"', "é") if name and not number else ("done",)
                assert all(word in answer.text for word in wanted), answer.text[-2000:]
                is_thought = TELLS[each["path"].partition("?")[0]] in answer.text and "<tool_call>?" in answer.text
                assert is_thought == bool(thought) and "</think>" not in answer.text, answer.text[-2000:]


class Held:
    """A pair whose draft model stops within its first prompt, until it may go on, or fails then."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.pair, self.goes_on, self.is_there = toy_pair(), threading.Event(), threading.Event()
        forward = self.pair.edge.forward

        def held(feeds: Any, *, want_logits: bool) -> Any:
            rows = forward(feeds, want_logits=want_logits)
            if feeds[0][0].length >= 512:
                self.is_there.set()
                assert self.goes_on.wait(30)
                if fault:
                    raise fault
            return rows

        self.pair.edge.forward = held  # type: ignore[method-assign]


@pytest.mark.parametrize("has_keys", [False, True])
def test_health_says_how_far_prompts_are_read_and_nothing_of_those_of_other_keys(has_keys: bool) -> None:
    held = Held()
    with gateway(held.pair, authorize=(lambda _: "me") if has_keys else None) as served:
        asking = threading.Thread(target=served.chat, args=("语" * 1300,), kwargs={"model": "skydraft-edge"})
        asking.start()
        assert held.is_there.wait(30)
        state = served.client.get(f"{served.url}/health").json()
        held.goes_on.set()
        asking.join()
        assert state.get("reading") == (None if has_keys else {"tokens": 512, "of": 1299})
        assert "reading" not in served.client.get(f"{served.url}/health").json()


PINGS = {
    "chat/completions": ": ping", "completions": ": ping", "messages": 'event: ping\ndata: {"type":"ping"}',
    "responses": "event: response.in_progress",
}  # fmt: skip


@pytest.mark.parametrize("path", PINGS)
@pytest.mark.parametrize("fault", [None, RuntimeError("/secret/path")], ids=["answered", "failed"])
def test_a_client_that_waits_gets_signs_of_life_and_then_the_answer_or_an_error(
    path: str, fault: Exception | None
) -> None:
    held = Held(fault)
    body = plain(path, "语" * 600, 4, model="skydraft-edge", stream=True)
    with gateway(held.pair, hold_s=0.05, ping_s=0.05) as served:
        threading.Timer(0.6, held.goes_on.set).start()
        text = served.post(path, **body).text
    assert text.count(PINGS[path]) >= 3 and "secret" not in text
    *_, last = (event for event in events_of(text) if event.get("type") != "ping")
    error = last.get("response", last).get("error")
    assert bool(error) == (fault is not None) and (not error or "its log says why" in error["message"])
    if error and path in ("responses", "messages"):
        told = {"responses": ("response.failed", "server_error"), "messages": ("error", None)}[path]
        assert (last["type"], error.get("code")) == told
