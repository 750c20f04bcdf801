"""Whatever interface a text comes by and whatever server checks it, what clients say is characters to the models."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

import skydraft

from ..reading_marks import engine_with, num_special, texts
from ..stock.fakes import Fake, fake
from ..toys import law
from .running import Running, over

TEMPLATE = (Path(__file__).parents[1] / "prompts" / "templates" / "qwen2.5.jinja").read_text("utf-8")
Served = tuple[Fake, Running]


@pytest.fixture(scope="module", params=["vllm", "llama-server", "sglang"])
def served_by(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A gateway over each kind of server that is sent token ids."""
    draft, target = engine_with(TEMPLATE), engine_with(TEMPLATE)
    with fake(request.param, target) as far, over(skydraft.connect(far.url, require=True), draft) as running:
        yield far, running


def chat(text: str) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({text: text})}}
    parameters = {"type": "object", "properties": {text: {"type": "string", "description": text, "enum": [text]}}}
    tool = {"type": "function", "function": {"name": "f", "description": text, "parameters": parameters}}
    talk = [
        {"role": "system", "content": text}, {"role": "user", "content": [{"type": "text", "text": text}]},
        {"role": "assistant", "content": text, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": text}, {"role": "user", "content": text},
    ]  # fmt: skip
    return {"messages": talk, "tools": [tool]}


def results_alone(text: str) -> dict[str, Any]:
    return {"messages": chat(text)["messages"][:4]}


def responses(text: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {text: {"type": "string", "description": text}}}
    tool = {"type": "function", "name": "f", "description": text, "parameters": parameters}
    talk = [
        {"role": "user", "content": [{"type": "input_text", "text": text}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": json.dumps({text: text})},
        {"type": "function_call_output", "call_id": "1", "output": text},
        {"role": "assistant", "content": [{"type": "output_text", "text": text}]}, {"role": "user", "content": text},
    ]  # fmt: skip
    return {"instructions": text, "input": talk, "tools": [tool]}


def messages(text: str) -> dict[str, Any]:
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": text}]}
    tool = {"name": "f", "description": text, "input_schema": {"type": "object", "properties": {text: {}}}}
    talk = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {text: text}}]},
        {"role": "user", "content": [result, {"type": "text", "text": text}]},
    ]
    return {"max_tokens": 2, "system": [{"type": "text", "text": text}], "messages": talk, "tools": [tool]}


TALKS = {"chat/completions": chat, "responses": responses, "messages": messages}
PATHS = [*TALKS.items(), ("chat/completions", results_alone)]


@pytest.mark.parametrize(("path", "body_of"), PATHS)
@given(text=texts)
@law(5)
def test_a_server_of_ids_gets_no_mark(served_by: Served, path: str, body_of: Callable[[str], Any], text: str) -> None:
    far, served = served_by
    more = {"model": "skydraft-cloud", "max_output_tokens" if path == "responses" else "max_tokens": 1}
    read = []
    for given_text in (text, "x"):
        num_asked = len(far.model.asked)
        answer = served.post(path, **body_of(given_text) | more)
        assert answer.status_code == 200, answer.text
        prompts = [prompt for asked in far.model.asked[num_asked:] for prompt in asked.prompts]
        read.append(set(map(num_special, prompts)) - {0})  # what a server is measured with has none
    assert read[0] == read[1] and len(read[0]) == 1
