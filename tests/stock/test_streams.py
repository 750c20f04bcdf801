"""Streams of OpenAI's kind as hosts send them, by public reports: ours reads the same text from them, with as many
requests. And how a text ends that a server does not end well: what was written is kept."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from skydraft.edge.stock.chat import Chat
from skydraft.edge.stock.ids import LlamaServer, Sglang, Vllm
from skydraft.edge.stock.refusals import refusal
from skydraft.errors import CloudFailure, LimitExceeded, RateLimited, SkydraftError
from skydraft.lab.learning.collect import lesson_of
from skydraft.lab.learning.lessons import UNJUDGED
from tests.hostile.texts import ALONE, LENGTH, STREAMS, TARGET, assert_all_is_accounted_for
from tests.stock import faults
from tests.stock.conftest import Spoilt, said
from tests.stock.faults import Fault, choices

# --- Odd, and to be read


def delta(change: Callable[[Any], Any]) -> Fault:
    return choices(lambda choice: choice | {"delta": change(choice["delta"])} if "delta" in choice else choice)


def before(*lines: bytes) -> Fault:
    return faults.retells(lambda event: b"".join(lines) + event)


def event(**said: Any) -> bytes:
    return b"data: " + json.dumps({"id": "", "object": "", "created": 0, "model": ""} | said).encode() + b"\n\n"


ANYWHERE: dict[str, Fault] = {
    "Azure: filter results without a choice": before(event(choices=[], prompt_filter_results=[])),
    "choices: null": before(event(choices=None, usage={"prompt_tokens": 1})),
    "a null for a choice": before(event(choices=[None])),
    "no error": faults.retells_json(lambda event: event | {"error": None}),
    "a blank reason": choices(lambda choice: choice | {"finish_reason": choice["finish_reason"] or " "}),
    "a reason each time": choices(lambda choice: choice | {"finish_reason": "stop"}),
    "an unknown end": choices(lambda choice: choice | {"finish_reason": choice["finish_reason"] and "eos_token"}),
    "comments": before(b": OPENROUTER PROCESSING\n\n", b":\n", b"data: : OPENROUTER PROCESSING\n\n"),
    "empty data": before(b"data:\n\n", b"data: \n\n", b"data: null\n\n"),
    "other fields": before(b"id: 7\n", b"retry: 1000\n", b'event: own.progress\ndata: {"tool": "search"}\n\n'),
    "no blank after the colon": faults.retells(lambda event: event.replace(b"data: ", b"data:")),
    "CRLF": faults.retells(lambda event: event.replace(b"\n", b"\r\n")),
    "neither [DONE] nor a last line's end": faults.retells(
        lambda event: b"" if b"[DONE]" in event else event.rstrip() if b'"usage": {' in event else event
    ),
    "a byte order mark": before(b"\xef\xbb\xbf"),
}
CHATS: dict[str, Fault] = {
    "Azure: a choice without text": before(event(choices=[{"index": 0, "finish_reason": None}], usage=None)),
    "delta: null at the end": delta(lambda said: said if said.get("content") else None),
    "no reasoning": delta(lambda said: said | {"content": said.get("content") or None, "reasoning": ""}),
    "content in parts": delta(lambda said: said | {"content": [{"type": "text", "text": said.get("content", "")}]}),
    "a message for a delta": choices(lambda choice: {"message": choice["delta"]} | choice | {"delta": None}),
    "a refusal": delta(lambda said: said | {"content": None, "refusal": said.get("content")}),
}


@pytest.mark.parametrize(("name", "api"), [
    *((name, "chat") for name in ANYWHERE | CHATS), *((name, "vllm") for name in ANYWHERE),
])  # fmt: skip
def test_a_stream_that_broke_others_is_read(name: str, api: str, spoilt: Spoilt) -> None:
    (_, num_sound), (generation, num_asked) = spoilt(api, "cloud"), spoilt(api, "cloud", (ANYWHERE | CHATS)[name])
    assert generation.token_ids == ALONE and num_asked <= num_sound


SAID, END = said(*"语速快"), {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
THOUGHTS: list[Any] = [{"content": None, "reasoning_content": "hm"}, {"reasoning": "so I think"}]
WHOLE: dict[str, tuple[str, Fault]] = {
    "an error after the end": ("语速快", faults.tells(*SAID, END, {"error": "too late"})),
    "no [DONE]": ("语速快", faults.tells(*SAID, END, done=False)),
    "noise after the end": ("语速快", faults.tells(*SAID, END, "[done]")),
    "halves of characters that stay alone": ("语\ufffd!", faults.tells(*said("语\ud83d", "!", "\ud83d"), END)),
    "thoughts": ("语速快", faults.tells(*({"choices": [{"delta": each}]} for each in THOUGHTS), *SAID, END)),
}


@pytest.mark.parametrize("plan", STREAMS)
@pytest.mark.parametrize("name", WHOLE)
def test_a_text_that_has_ended_is_whole_and_its_thoughts_are_paid(name: str, plan: str, spoilt: Spoilt) -> None:
    text, fault = WHOLE[name]
    generation, num_asked = spoilt("chat", plan, fault)
    assert (generation.text, generation.finish_reason, num_asked) == (text, "eos", 1) and not generation.reasoning
    assert generation.stats.tokens_out >= len(SAID) + len(THOUGHTS) * (name == "thoughts")


# --- Ended badly

NUM = 3  # events with text in each answer


def end(finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {}, "text": "", "token_ids": [], "finish_reason": finish}
    return event(choices=[choice], **more)


ENDS: dict[str, Fault] = {
    "an end without a reason": faults.bursts(NUM, b"data: [DONE]\n\n"),
    "OpenRouter: 502": faults.bursts(NUM, b'data: {"choices": [], "error": {"code": 502, "message": "full"}}\n\n'),
    "llama-server: the field error": faults.bursts(NUM, b'error: {"code": 500, "message": "x"}\n\ndata: [DONE]\n\n'),
    "an error without a field": faults.bursts(NUM, b'{"error": {"code": 500, "message": "x"}}'),
    "a page": faults.bursts(NUM, b"data: <html>\n\n"),
    "network_error": faults.bursts(NUM, end("network_error") + b"data: [DONE]\n\n"),
    "a break": faults.bursts(NUM, breaks=True),
    "a break within an event": faults.bursts(NUM, b'data: {"choi', breaks=True),
}


@pytest.mark.parametrize("plan", ["cloud", "checked", "hand-back"])
@pytest.mark.parametrize("name", ENDS)
def test_what_came_before_a_bad_end_is_kept(name: str, plan: str, spoilt: Spoilt) -> None:
    """54 tokens took 40 requests: each brought a token, whatever else had come with it."""
    (_, num_sound), (generation, num_asked) = spoilt("vllm", plan), spoilt("vllm", plan, ENDS[name])
    assert_all_is_accounted_for(generation)
    assert generation.token_ids == ALONE and "edge-fallback" not in generation.origins
    assert num_asked <= num_sound + len(ALONE) / (NUM - 1)


@pytest.mark.parametrize("name", ENDS)
def test_the_draft_model_goes_on_where_a_chat_ends_badly(name: str, spoilt: Spoilt) -> None:
    """The first event of this chat has no text."""
    generation, num_asked = spoilt("chat", "lossless", ENDS[name])
    assert_all_is_accounted_for(generation)
    assert list(generation.origins) == ["cloud"] * (NUM - 1) + ["edge-fallback"] * (LENGTH - NUM + 1) and num_asked == 1


def refused(status: int, **error: Any) -> Fault:
    return faults.refuses(status, json.dumps({"error": error}))


FILTERS: dict[str, Fault] = {
    "in an event of its own": faults.bursts(NUM, end("content_filter") + b"data: [DONE]\n\n"),
    "Gemini: with the reason": faults.bursts(NUM, end("content_filter: SAFETY")),
    "Gemini's own": faults.bursts(NUM, end("PROHIBITED_CONTENT")),
    "DashScope: an error": faults.bursts(NUM, end(error={"code": "data_inspection_failed", "message": "no."})),
}
REFUSED: dict[str, Fault] = {
    "Azure": refused(400, code="content_filter", message="The response was filtered.", type=None, param="prompt"),
    "DeepSeek": refused(400, type="invalid_request_error", message="Content Exists Risk"),
    "at once": faults.tells({"id": "", "choices": [{"index": 0, "delta": {}, "finish_reason": "content_filter"}]}),
}


@pytest.mark.parametrize("plan", STREAMS)
@pytest.mark.parametrize("name", [*FILTERS, *REFUSED])
def test_a_filter_ends_the_text(name: str, plan: str, spoilt: Spoilt) -> None:
    """It was asked again, then the text was lost; the draft model went on past it. No model chose its end."""
    generation, num_asked = spoilt("chat", plan, (FILTERS | REFUSED)[name])
    assert generation.finish_reason == "content_filter" and num_asked == 1
    own = generation.token_ids[:-1]
    assert generation.text == TARGET.vocab.decode(own) and ALONE[: len(own)] == own and bool(own) == (name in FILTERS)
    assert generation.token_ids[-1] in TARGET.vocab.end_ids and "edge-fallback" not in generation.origins
    lesson = lesson_of(generation, "a", "b", "c")
    assert lesson is None or (lesson.marks[-1] == UNJUDGED and UNJUDGED not in lesson.marks[:-1])


@pytest.mark.parametrize("kind", [Vllm(), Sglang(), LlamaServer(), Chat()])
@pytest.mark.parametrize(("event", "error", "says"), [
    ({"error": {"message": "no\nway", "code": 429}}, RateLimited, "The server answered 429: no way"),
    ({"error": {"message": "no", "code": "server_error"}}, CloudFailure, "an error in place of an answer: no"),
    ({"error": "no"}, CloudFailure, "an error in place of an answer: no"),
    ({"error": {"code": 400, "message": "exceeds the available context size"}}, LimitExceeded, "context size"),
    ({"error": {"code": [], "message": {}}}, CloudFailure, "The server sent an error in place of an answer."),
])  # fmt: skip
def test_an_error_within_a_stream_says_what_it_is(kind: Any, event: Any, error: type[SkydraftError], says: str) -> None:
    with pytest.raises(error, match=says) as told:
        kind.written(event)
    assert type(told.value) is error and "\n" not in str(told.value)


@pytest.mark.parametrize(("text", "seconds"), [("7", 7), ("", 1), ("soon", 1), ("-3", 1), ("9" * 400, 3600)])
def test_a_server_says_when_to_ask_again(text: str, seconds: float) -> None:
    error = refusal(429, {"retry-after": text}, b"")
    assert isinstance(error, RateLimited) and error.retry_after_s == seconds


def test_who_cannot_wait_so_long_hears_for_how_long(spoilt: Spoilt) -> None:
    with pytest.raises(RateLimited, match="answered 429") as raised:
        spoilt("vllm", "cloud", faults.refuses(429, Retry_After="3000"))
    assert raised.value.retry_after_s == 3000
