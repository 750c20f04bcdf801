"""Streams that broke other clients of OpenAI's interface, by public reports. Ours read the same text from them, with as
many requests."""

import itertools
import json
import time
from collections.abc import Callable
from contextlib import closing
from email.utils import formatdate
from typing import Any

import pytest

import skydraft
from skydraft.edge.stock.chat import Chat
from skydraft.edge.stock.ids import LlamaServer, Sglang, Vllm
from skydraft.edge.stock.refusals import refusal
from skydraft.errors import CloudFailure, LimitExceeded, RateLimited, SkydraftError, TargetChanged
from tests.gateway.interfaces import QUESTION, WHOLE, body_of
from tests.gateway.running import over
from tests.hostile.texts import ALONE, TARGET, write
from tests.stock import faults
from tests.stock.conftest import Spoilt
from tests.stock.fakes import GENERATING, fake
from tests.stock.faults import Fault

SAFE = {"hate": {"filtered": False, "severity": "safe"}}
BARE = {"id": "", "object": "", "created": 0, "model": ""}  # as Azure begins and ends


def choices(change: Callable[[Any], Any]) -> Fault:
    return faults.retells_json(lambda event: event | {"choices": [change(each) for each in event["choices"]]})


def delta(change: Callable[[Any], Any]) -> Fault:
    return choices(lambda choice: choice | {"delta": change(choice["delta"])} if "delta" in choice else choice)


def before(*lines: bytes) -> Fault:
    return faults.retells(lambda event: b"".join(lines) + event)


def event(**said: Any) -> bytes:
    return b"data: " + json.dumps(BARE | said).encode() + b"\n\n"


FILTERS = {"index": 0, "finish_reason": None, "content_filter_results": SAFE, "content_filter_offsets": {}}
ANYWHERE: dict[str, Fault] = {
    "Azure: filter results without a choice": before(event(choices=[], prompt_filter_results=[])),
    "Azure: a choice without text": before(event(choices=[FILTERS], usage=None)),
    "choices: null": before(event(choices=None, usage={"prompt_tokens": 1})),
    "no choices": before(event(usage={"prompt_tokens": 1, "completion_tokens": 0})),
    "a null for a choice": before(event(choices=[None])),
    "no error": faults.retells_json(lambda event: event | {"error": None}),
    "an empty reason": choices(lambda choice: choice | {"finish_reason": choice["finish_reason"] or ""}),
    "a blank reason": choices(lambda choice: choice | {"finish_reason": choice["finish_reason"] or " "}),
    "a reason each time": choices(lambda choice: choice | {"finish_reason": "stop"}),
    "an unknown end": choices(lambda choice: choice | {"finish_reason": choice["finish_reason"] and "eos_token"}),
    "the index of the token": choices(lambda choice: choice | {"index": 7}),
    "comments": before(b": OPENROUTER PROCESSING\n\n", b":\n", b": keep-alive\n\n"),
    "comments as data": before(b"data: : OPENROUTER PROCESSING\n\n"),
    "empty data": before(b"data:\n\n", b"data: \n\n"),
    "other fields": before(b"id: 7\n", b"retry: 1000\n", b"event: message\n"),
    "events of its own": before(b'event: hermes.tool.progress\ndata: {"tool": "search"}\n\n'),
    "no blank after the colon": faults.retells(lambda event: event.replace(b"data: ", b"data:")),
    "CRLF": faults.retells(lambda event: event.replace(b"\n", b"\r\n")),
    "no [DONE]": faults.retells(lambda event: b"" if b"[DONE]" in event else event),
    "neither [DONE] nor a last line's end": faults.retells(
        lambda event: b"" if b"[DONE]" in event else event.rstrip() if b'"usage": {' in event else event
    ),
    "a byte order mark": before(b"\xef\xbb\xbf"),
    "data: null": before(b"data: null\n\n"),
    "log-probabilities: null": choices(lambda choice: choice | {"logprobs": None}),
}  # fmt: skip
OF_TEXT = ("Azure: a choice without text",)  # a server of ids without ids is an old one: it is told so
CHATS: dict[str, Fault] = {
    "delta: null at the end": choices(
        lambda choice: choice | ({} if choice["delta"].get("content") else {"delta": None})
    ),
    "content: null": delta(lambda said: said | {"content": said.get("content") or None}),
    "no reasoning": delta(lambda said: said | {"reasoning_content": None, "reasoning": "", "reasoning_details": []}),
    "content in parts": delta(lambda said: said | {"content": [{"type": "text", "text": said.get("content", "")}]}),
    "a message for a delta": choices(lambda choice: {"message": choice["delta"]} | choice | {"delta": None}),
    "a refusal": delta(lambda said: said | {"content": None, "refusal": said.get("content")}),
    "empty calls": delta(lambda said: said | {"tool_calls": [], "function_call": None, "refusal": None, "role": None}),
}


@pytest.mark.parametrize(("name", "api"), [
    *((name, "chat") for name in ANYWHERE | CHATS), *((name, "vllm") for name in ANYWHERE if name not in OF_TEXT),
])  # fmt: skip
def test_a_stream_that_broke_others_is_read(name: str, api: str, spoilt: Spoilt) -> None:
    (_, num_sound), (generation, num_asked) = spoilt(api, "cloud"), spoilt(api, "cloud", (ANYWHERE | CHATS)[name])
    assert generation.token_ids == ALONE and num_asked <= num_sound


def test_half_a_character_that_stays_alone_is_none(spoilt: Spoilt) -> None:
    """A server that counts in UTF-16 may cut an emoji between two events: tests/stock/test_chat.py joins halves."""
    said = [{"choices": [{"index": 0, "delta": {"content": each}}]} for each in ("语\ud83d", "!", "\ud83d")]
    generation, _ = spoilt("chat", "lossless", faults.tells(*said))
    assert generation.text.startswith("语\ufffd!")


SAID = [{"choices": [{"index": 0, "delta": {"content": each}}]} for each in "语速快"]
END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
WHOLE_TEXTS: dict[str, Fault] = {
    "an error after the end": faults.tells(*SAID, END, {"error": "too late"}),
    "no [DONE]": faults.tells(*SAID, END, done=False), "noise after the end": faults.tells(*SAID, END, "[done]"),
}  # fmt: skip


@pytest.mark.parametrize("plan", ["cloud", "lossless"])
@pytest.mark.parametrize("ends", WHOLE_TEXTS)
def test_a_text_that_has_ended_is_whole_whatever_comes_after_it(ends: str, plan: str, spoilt: Spoilt) -> None:
    generation, num_asked = spoilt("chat", plan, WHOLE_TEXTS[ends])
    assert (generation.text, generation.finish_reason, num_asked) == ("语速快", "eos", 1)


@pytest.mark.parametrize(("kind", "num_served"), [("openai", 3), ("vllm", 2)])
def test_a_server_that_answers_as_another_model_costs_one_text_at_most(kind: str, num_served: int) -> None:
    """A gateway refused every later text until it was started again, as if the old model had to come back."""
    with fake(kind, TARGET) as server, closing(skydraft.connect(server.url, require=True)) as cloud:
        served = 0
        for name in ("snapshot-A", "snapshot-B", "snapshot-B"):
            named = faults.retells_json(lambda event, name=name: event | {"model": name})
            server.fault_of = lambda path, named=named: named if path in GENERATING else None
            try:
                served += write(cloud, "cloud", raw=kind != "openai").run().token_ids == ALONE
            except TargetChanged as error:
                assert "answers as snapshot-B now" in str(error)
        assert served == num_served


@pytest.mark.parametrize("kind", [Vllm(), Sglang(), LlamaServer(), Chat()])
@pytest.mark.parametrize(("event", "error", "says"), [
    ({"error": {"message": "no\nway", "code": 429}}, RateLimited, "The server answered 429: no way"),
    ({"error": {"message": "no", "code": "server_error"}}, CloudFailure, "an error in place of an answer: no"),
    ({"error": "no"}, CloudFailure, "an error in place of an answer: no"),
    ({"error": {"code": 400, "message": "exceeds the available context size"}}, LimitExceeded, "context size"),
    ({"object": "error", "message": "no", "code": 50001}, CloudFailure, "an error in place of an answer: no"),
    ({"message": "no", "type": "overloaded_error"}, CloudFailure, "an error in place of an answer: no"),
    ({"choices": None, "error_message": "no", "error_type": "E"}, CloudFailure, "in place of an answer: no"),
    ({"error": {"code": [], "message": {}}}, CloudFailure, "The server sent an error in place of an answer."),
])  # fmt: skip
def test_an_error_within_a_stream_says_what_it_is(kind: Any, event: Any, error: type[SkydraftError], says: str) -> None:
    with pytest.raises(error, match=says) as told:
        kind.written(event)
    assert type(told.value) is error and "\n" not in str(told.value)


@pytest.mark.parametrize(("text", "seconds"), [("7", 7), ("", 1), ("soon", 1), ("-3", 0), (60, 60), ("1e9", 3600)])
def test_a_server_says_when_to_ask_again_in_seconds_or_as_a_date(text: str | int, seconds: float) -> None:
    given = formatdate(time.time() + text, usegmt=True) if isinstance(text, int) else text
    error = refusal(429, {"retry-after": given}, b"")
    assert isinstance(error, RateLimited) and error.retry_after_s == pytest.approx(seconds, abs=2)


def test_who_cannot_wait_so_long_hears_for_how_long(spoilt: Spoilt) -> None:
    with pytest.raises(RateLimited, match="answered 429") as raised:
        spoilt("vllm", "cloud", faults.refuses(429, Retry_After="3000"))
    assert raised.value.retry_after_s == 3000


CALLED = [
    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "get_weather", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": "x"},
]
SAYS = "does not apply to a chat server, which puts messages into a template of its own; mode edge takes it."


def test_what_a_chat_server_has_no_place_for_is_refused_at_once_in_one_line() -> None:
    """In each interface, whole and streamed; a name has a place."""
    with fake("openai") as server, over(skydraft.connect(server.url, api="chat", model="toy")) as served:
        asked = [body_of(path, choice) | {"path": path} for path in WHOLE for choice in ("auto", "required")]
        talk = {"path": "chat/completions", "model": "skydraft-lossless", "max_tokens": 8}
        open_end = [*QUESTION, {"role": "assistant", "content": "a"}]
        asked += [talk | {"messages": open_end, "continue_final_message": True}]
        begun = {"continue_ids": [1], "continue_as_prompt": True}  # the server's own answer would begin anew
        asked += [talk | {"messages": QUESTION, "skydraft": begun}, talk | {"path": "completions", "prompt": "a"}]
        for body, stream, mode in itertools.product(asked, (False, True), ("lossless", "cloud")):
            answer = served.post(**body | {"stream": stream, "model": f"skydraft-{mode}"})
            assert answer.status_code == 400 and answer.json()["error"]["message"].endswith(SAYS), answer.text
        assert "语速" not in str(server.model.asked)
        ids = [each["id"] for each in served.client.get(f"{served.v1}/models").json()["data"]]
        assert ids == ["skydraft", *(f"skydraft-{mode}" for mode in ("edge", "cloud", "lossless"))]
        named = [{**QUESTION[0], "name": "ann"}]
        for messages in (named, [*QUESTION, *CALLED]):  # results without tools are words of the user
            assert served.post(**talk | {"messages": messages, "model": "skydraft-cloud"}).status_code == 200
    assert server.model.asked[-2].body["messages"] == named
