"""Coding agents: what they sent is answered, too long a prompt is told as they understand it, and waiting is shown."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from .interfaces import call_text, plain
from .running import Running, gateway, toy_pair
from .scripted import scripted_pair

RECORDED = sorted((Path(__file__).parent / "agents").glob("*.json"))
TELLS = {"/v1/messages": '"thinking":"hm', "/v1/responses": '"reasoning_text"',
         "/v1/chat/completions": '"reasoning_content":"hm'}  # fmt: skip
MARK = "x-anthropic-billing-header: cc_version=2.1.197.bcb; cc_entrypoint=cli; cch="


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


def test_the_line_for_the_makers_bill_is_not_read_and_what_a_proxy_joined_to_it_is(served: Running) -> None:
    """It changes with each request, so a prompt that begins with it would be read from its first token again."""

    def count(*system: str, form: str = "blocks") -> int:
        texts: Any = "".join(system) if form == "text" else [{"type": "text", "text": text} for text in system]
        body = plain("messages") | ({} if form == "turn" else {"system": texts})
        if form == "turn":
            body["messages"] = [{"role": "system", "content": texts}, *body["messages"]]
        answer = served.post("messages/count_tokens?beta=true", **body)
        return int(answer.json()["input_tokens"])

    want = count("be kind")
    assert count() < want < count("be kinder") and count(f"a\n{MARK}1;") > count("a\n")
    for form in ("blocks", "text", "turn"):
        for joined in ("{}\n", "{}\n\n", "{} ", "\n{}\n"):
            assert count(joined.format(f"{MARK}abcde;") + "be kind", form=form) == want, (form, joined)
        assert count(f"{MARK}012;", form=form) == count()
    assert count(f"{MARK}abcde;", "be kind") == count(f"{MARK}012;\n", "be kind", form="turn") == want


TOO_LONG = "语" * 5000


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_told_in_the_words_of_each_client(served: Running, stream: bool) -> None:
    fields = {"messages": [{"role": "user", "content": TOO_LONG}], "stream": stream, "max_tokens": 8}
    for path in ("chat/completions", "messages"):
        answer = served.post(path, model="skydraft-lossless", **fields)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["type"] == "invalid_request_error"
        assert error.get("code", "context_length_exceeded") == "context_length_exceeded"
        # As Claude Code looks for it.
        found = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", error["message"], re.I)
        assert found and int(found[1]) >= 4999 and int(found[2]) == 4096, error
    answer = served.post("responses", model="skydraft-lossless", input=TOO_LONG, stream=stream)
    if stream:  # Codex compacts only at this event
        last = json.loads(answer.text.strip().splitlines()[-1].removeprefix("data: "))
        assert answer.status_code == 200 and last["type"] == "response.failed"
        assert last["response"]["error"]["code"] == "context_length_exceeded"
    else:
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


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


@pytest.mark.parametrize(("path", "ping"), [
    ("chat/completions", ": ping"), ("messages", 'event: ping\ndata: {"type":"ping"}'),
    ("responses", "event: response.in_progress"),
])  # fmt: skip
@pytest.mark.parametrize("fault", [None, RuntimeError("/secret/path")], ids=["answered", "failed"])
def test_a_client_that_waits_gets_signs_of_life_that_it_counts(path: str, ping: str, fault: Exception | None) -> None:
    held = Held(fault)
    body = plain(path, "语" * 600, 4, model="skydraft-edge", stream=True)
    with gateway(held.pair, hold_s=0.05, ping_s=0.05) as served:
        threading.Timer(0.6, held.goes_on.set).start()
        text = served.post(path, **body).text
        assert text.count(ping) >= 3 and "secret" not in text and ("its log says why" in text) == (fault is not None)
