"""Anthropic's SDK against a gateway whose pair thinks and calls a tool: whole is streamed, and every event is valid.

LiteLLM against a running gateway.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest

from tests.gateway.interfaces import call_text
from tests.gateway.running import Running, gateway, scripted_pair

from .conftest import ASKED, MAX_TOKENS, MODEL, SEED, TOO_LONG, expected

anthropic: Any = pytest.importorskip("anthropic", reason="anthropic is not installed")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import looks for a list of prices online
litellm: Any = pytest.importorskip("litellm", reason="litellm is not installed")

pytestmark = [pytest.mark.conformance, pytest.mark.filterwarnings("default")]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
KINDS = {"thinking": "thinking", "text": "text", "tool_use": "input"}
WEATHER_ASKED: Any = [{"role": "user", "content": "weather?"}]
TOOLS = [{"name": "weather", "input_schema": SCHEMA}]
GIVEN: Any = {"tools": TOOLS, "thinking": {"type": "enabled", "budget_tokens": 1024}}


@pytest.fixture(scope="module")
def thinking() -> Iterator[Running]:
    steps = [call_text("weather", {"city": "巴黎"}), "It is 天."]
    with gateway(scripted_pair(steps, 20_000, "hm <tool_call>?")) as served:
        yield served


@pytest.mark.parametrize("mode", ["lossless", "quality"])
def test_thinking_and_calls_come_whole_and_streamed_and_go_back(thinking: Running, mode: str) -> None:
    client = anthropic.Anthropic(base_url=thinking.url, api_key="none", max_retries=0)
    told, asked = [], {"model": f"skydraft-{mode}", "max_tokens": 2048, **GIVEN}
    for messages in (client.messages, client.beta.messages):
        answer = messages.create(messages=WEATHER_ASKED, **asked)
        with messages.stream(messages=WEATHER_ASKED, **asked) as stream:
            final = stream.get_final_message()
        results = [{"type": "tool_result", "tool_use_id": final.content[-1].id, "content": "sunny"}]
        turns = [*WEATHER_ASKED, {"role": "assistant", "content": final.content}, {"role": "user", "content": results}]
        then = messages.create(messages=turns, **asked)
        for each in (answer, final, then):
            told += [(part.type, getattr(part, KINDS[part.type])) for part in each.content]
        assert [each.stop_reason for each in (answer, final, then)] == ["tool_use", "tool_use", "end_turn"]
        assert {each.usage.output_tokens_details.thinking_tokens for each in (answer, final)} == {2}
        given = {name: value for name, value in asked.items() if name != "max_tokens"}
        assert messages.count_tokens(messages=turns, **given).input_tokens == then.usage.input_tokens
    first, last = ("thinking", "hm <tool_call>?"), [("tool_use", {"city": "巴黎"}), ("text", "It is 天.")]
    assert told == [first, last[0], first, last[0], first, last[1]] * 2


def test_every_part_is_one_of_the_schema(thinking: Running) -> None:
    body = {"model": "skydraft-lossless", "max_tokens": 2048, "messages": WEATHER_ASKED, **GIVEN}
    anthropic.types.Message.model_validate(thinking.post("messages", **body).json())
    event = pydantic.TypeAdapter(anthropic.types.RawMessageStreamEvent)
    for line in thinking.post("messages", **body, stream=True).text.splitlines():
        if line.startswith("data: "):
            event.validate_python(json.loads(line.removeprefix("data: ")))


def options(served: Running, **more: Any) -> dict[str, Any]:
    """What `litellm.completion` takes."""
    given: dict[str, Any] = {
        "model": f"openai/{MODEL}", "api_base": served.v1, "api_key": "none", "messages": ASKED, "temperature": 0,
        "seed": SEED, "max_tokens": MAX_TOKENS, "max_retries": 0,
    }  # fmt: skip
    return given | more


def test_an_answer_and_its_usage_whole_and_streamed(served: Running) -> None:
    want = expected()
    got = litellm.completion(**options(served))
    assert got.choices[0].message.content == want.text and got.choices[0].finish_reason == "length"
    assert got.skydraft["origins"] == list(want.origins)
    chunks = list(litellm.completion(**options(served, stream=True, stream_options={"include_usage": True})))
    assert len(chunks) > 4  # it came in parts
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == want.text
    used = [each.usage for each in (got, *chunks) if getattr(each, "usage", None)]
    assert [(each.prompt_tokens, each.completion_tokens) for each in used] == [(want.num_prompt_tokens, MAX_TOKENS)] * 2


def test_what_is_refused_is_an_error_of_its_own_kind(served: Running) -> None:
    with pytest.raises(litellm.NotFoundError, match="skydraft-lossless"):
        litellm.completion(**options(served, model="openai/gpt-9"))
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**options(served, messages=[{"role": "user", "content": TOO_LONG}]))
