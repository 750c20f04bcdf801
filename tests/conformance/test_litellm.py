"""LiteLLM against a running gateway."""

import json
import os
from typing import Any

import jsonschema
import pytest

from tests.gateway.running import Running

from .asking import ASKED, ENOUGH, MAX_TOKENS, MODEL, NOTHING_FITS, PICK_TOOL, QUESTION, SEED, TOO_LONG, expected

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import looks for a list of prices online
litellm: Any = pytest.importorskip("litellm", reason="litellm is not installed")

pytestmark = [pytest.mark.conformance, pytest.mark.filterwarnings("default")]


def options(served: Running, **more: Any) -> dict[str, Any]:
    """What `litellm.completion` takes."""
    given: dict[str, Any] = {
        "model": f"openai/{MODEL}", "api_base": served.v1, "api_key": "none", "messages": ASKED, "temperature": 0,
        "seed": SEED, "max_tokens": MAX_TOKENS, "max_retries": 0,
    }  # fmt: skip
    return given | more


def test_an_answer_and_its_usage(served: Running) -> None:
    want = expected()
    got = litellm.completion(**options(served))
    assert got.choices[0].message.content == want.text and got.choices[0].finish_reason == "length"
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (want.num_prompt_tokens, MAX_TOKENS)
    assert got.skydraft["origins"] == list(want.origins)


def test_a_stream_is_the_same_answer(served: Running) -> None:
    want = expected()
    chunks = list(litellm.completion(**options(served, stream=True, stream_options={"include_usage": True})))
    assert len(chunks) > 4  # it came in parts
    used = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert [(each.prompt_tokens, each.completion_tokens) for each in used] == [(want.num_prompt_tokens, MAX_TOKENS)]
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == want.text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pick_city"}}])
def test_a_call_that_is_asked_for_is_made(served: Running, choice: Any) -> None:
    asked = options(served, tools=[PICK_TOOL], tool_choice=choice, max_tokens=ENOUGH, temperature=1.0)
    got = litellm.completion(**asked).choices[0]
    assert got.finish_reason == "tool_calls" and not got.message.content
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in got.message.tool_calls]
    for name, arguments in calls:
        assert name == "pick_city"
        jsonschema.validate(arguments, {**PICK_TOOL["function"]["parameters"], "additionalProperties": False})
    assert len(calls) == 1 or choice == "required"
    chunks = list(litellm.completion(**asked, stream=True))
    whole = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in whole] == calls and len(chunks) > 2


def test_a_loop_ends_with_what_the_tool_gave(called: Running) -> None:
    asked = options(called, model="openai/skydraft-lossless", tools=[PICK_TOOL])
    message = litellm.completion(**asked).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "上海", "days": 3}
    turns = [*ASKED, message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    assert litellm.completion(**asked | {"messages": turns}).choices[0].message.content == "done"


def test_what_is_refused_is_an_error_of_its_own_kind(served: Running) -> None:
    with pytest.raises(litellm.NotFoundError, match="skydraft-lossless"):
        litellm.completion(**options(served, model="openai/gpt-9"))
    with pytest.raises(litellm.BadRequestError, match="there is no tool 'f'"):
        named = {"type": "function", "function": {"name": "f"}}
        litellm.completion(**options(served, tools=[PICK_TOOL], tool_choice=named))
    with pytest.raises(litellm.BadRequestError, match="grammar does not compile"):
        litellm.completion(**options(served, response_format=NOTHING_FITS))
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**options(served, messages=[{"role": "user", "content": TOO_LONG}]))


def test_the_older_interface_continues_a_text(served: Running) -> None:
    asked: dict[str, Any] = {
        "model": "text-completion-openai/skydraft-lossless", "api_base": served.v1, "api_key": "none",
        "prompt": QUESTION, "max_tokens": 8, "temperature": 0,
    }  # fmt: skip
    text = litellm.text_completion(**asked).choices[0].text
    chunks = litellm.text_completion(**asked, stream=True)
    assert text and "".join(chunk.choices[0].text or "" for chunk in chunks) == text


def test_responses_are_those_of_the_gateway(served: Running) -> None:
    given = {name: value for name, value in options(served).items() if name.startswith(("model", "api", "temp"))}
    got = litellm.responses(input=QUESTION, max_output_tokens=MAX_TOKENS, **given)
    assert got.output[0].content[0].text == expected().text and got.usage.output_tokens == MAX_TOKENS
