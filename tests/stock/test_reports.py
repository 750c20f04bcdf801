"""Streams that broke other clients of OpenAI's interface, by public reports. Ours read the same text from them, with as
many requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from skydraft.edge.channel import Waiting
from skydraft.edge.stock.chat import Chat
from skydraft.edge.stock.dialect import Read
from skydraft.edge.stock.ids import LlamaServer, Sglang, Vllm
from skydraft.edge.stock.writing import TextWriting
from skydraft.errors import CloudFailure, LimitExceeded, RateLimited, SkydraftError
from tests.hostile.texts import ALONE, TARGET
from tests.stock import faults
from tests.stock.conftest import Spoilt
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
        lambda event: b"" if b"[DONE]" in event else event.rstrip() if b'"usage"' in event else event
    ),
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
    "empty calls": delta(lambda said: said | {"tool_calls": [], "function_call": None, "refusal": None, "role": None}),
}


@pytest.mark.parametrize(
    ("name", "api"),
    [
        *((name, api) for name in ANYWHERE for api in ("completions", "chat")),
        *((name, "vllm") for name in ANYWHERE if name not in OF_TEXT), *((name, "chat") for name in CHATS),
    ],
)  # fmt: skip
def test_a_stream_that_broke_others_is_read(name: str, api: str, spoilt: Spoilt) -> None:
    (_, num_sound), (generation, num_asked) = spoilt(api, "cloud"), spoilt(api, "cloud", (ANYWHERE | CHATS)[name])
    assert generation.token_ids == ALONE and num_asked <= num_sound


def test_halves_of_a_character_are_joined() -> None:
    """A server that counts in UTF-16 may cut an emoji between two events; a half that stays alone is no character."""
    said = iter([Read(text="\ud83d"), Read(text="\ude00\ud83d"), Read(text="!"), None])

    async def come(waiting: Waiting) -> Any:
        return next(said)

    async def written() -> bytes:
        request = SimpleNamespace(says=lambda usage: None)
        events: Any = SimpleNamespace(arriving=come, read=lambda came: came, has_more=False, request=request)
        dialect = SimpleNamespace(echoes=False, written=lambda read: read)
        ids = np.array([1], np.int32)
        writing = TextWriting(events, dialect, ids, TARGET.vocab, text="", pending=b"", end_id=0)
        text = b""
        while (row := await writing.next_row(Waiting(1, 1, 1))) is not None:
            text += TARGET.vocab.pieces[row.token_id]
        return text

    assert asyncio.run(written()).decode() == "\U0001f600\ufffd!"


@pytest.mark.parametrize(
    "said",
    [
        {"reasoning_content": "so"}, {"reasoning": "so"}, {"reasoning_details": [{"text": "so"}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "so"}]}]},
    ],
)  # fmt: skip
def test_a_model_that_reasons_is_noticed(said: Any) -> None:
    """Its answer cannot be gone on with: it would reason again, and what it wrote would be lost without a word."""
    chat = Chat("http://127.0.0.1")
    with pytest.raises(CloudFailure, match="reasons before it answers"):
        chat.written({"choices": [{"index": 0, "delta": {"content": None} | said}]})


@pytest.mark.parametrize("kind", [Vllm(), Sglang(), LlamaServer()])
@pytest.mark.parametrize(
    ("event", "error", "says"),
    [
        ({"error": {"message": "no\nway", "code": 429}}, RateLimited, "The server answered 429: no way"),
        ({"error": {"message": "no", "code": "server_error"}}, CloudFailure, "an error in place of an answer: no"),
        ({"error": "no"}, CloudFailure, "an error in place of an answer: no"),
        ({"error": {"code": 400, "message": "exceeds the available context size"}}, LimitExceeded, "context size"),
        ({"object": "error", "message": "no", "code": 50001}, CloudFailure, "an error in place of an answer: no"),
        ({"choices": None, "error_message": "no", "error_type": "E"}, CloudFailure, "in place of an answer: no"),
        ({"error": {"code": [], "message": {}}}, CloudFailure, "The server sent an error in place of an answer."),
    ],
)
def test_an_error_within_a_stream_says_what_it_is(kind: Any, event: Any, error: type[SkydraftError], says: str) -> None:
    with pytest.raises(error, match=says) as told:
        kind.written(event)
    assert type(told.value) is error and "\n" not in str(told.value)
