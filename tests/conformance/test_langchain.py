"""LangChain (langchain-openai) against a running gateway."""

from typing import Any

import pytest

from tests.gateway.running import Running

from .asking import (
    CONVERSATION,
    ENOUGH,
    MAX_TOKENS,
    MODEL,
    NOTHING_FITS,
    QUESTION,
    SEED,
    TOO_LONG,
    Voice,
    expected,
    pick_city,
)

langchain_openai: Any = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
exceptions: Any = pytest.importorskip("langchain_core.exceptions", reason="langchain-core is not installed")
messages: Any = pytest.importorskip("langchain_core.messages", reason="langchain-core is not installed")

pytestmark = [pytest.mark.conformance, pytest.mark.filterwarnings("default")]


def chat(served: Running, **options: Any) -> Any:
    """A chat model at the gateway."""
    given = {"model": MODEL, "temperature": 0, "seed": SEED, "max_tokens": MAX_TOKENS, "max_retries": 0} | options
    return langchain_openai.ChatOpenAI(base_url=served.v1, api_key="none", **given)


def test_an_answer_and_its_usage(served: Running) -> None:
    want = expected()
    got = chat(served).invoke(QUESTION)
    assert got.content == want.text and got.response_metadata["finish_reason"] == "length"
    used = got.usage_metadata
    assert (used["input_tokens"], used["output_tokens"]) == (want.num_prompt_tokens, MAX_TOKENS)
    assert used["total_tokens"] == want.num_prompt_tokens + MAX_TOKENS


def test_a_stream_is_the_same_answer(served: Running) -> None:
    want = expected()
    chunks = list(chat(served, stream_usage=True).stream(QUESTION))
    assert "".join(chunk.content for chunk in chunks) == want.text
    assert sum(bool(chunk.content) for chunk in chunks) > 1  # it came in parts
    used = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert [(each["input_tokens"], each["output_tokens"]) for each in used] == [(want.num_prompt_tokens, MAX_TOKENS)]


def test_a_conversation_with_a_system_message(served: Running) -> None:
    want = expected(CONVERSATION)
    got = chat(served).invoke(messages.convert_to_messages(CONVERSATION))
    assert got.content == want.text != expected(CONVERSATION[1:]).text
    assert got.usage_metadata["input_tokens"] == want.num_prompt_tokens


@pytest.mark.parametrize("choice", ["any", "pick_city"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_call_that_is_asked_for_is_made(served: Running, choice: str, temperature: float) -> None:
    model = chat(served, max_tokens=ENOUGH, temperature=temperature).bind_tools([pick_city], tool_choice=choice)
    got = model.invoke(QUESTION)
    assert got.tool_calls and not got.invalid_tool_calls and not got.content
    assert len(got.tool_calls) == 1 or choice == "any"
    for call in got.tool_calls:
        assert call["name"] == "pick_city" and pick_city(**call["args"])
        assert set(call["args"]) == {"city", "days"} and call["args"]["city"] in ("上海", "北京")
    chunks = list(model.stream(QUESTION))
    whole = sum(chunks[1:], chunks[0])
    told = [(call["name"], call["args"]) for call in whole.tool_calls]
    assert told == [(call["name"], call["args"]) for call in got.tool_calls] and len(chunks) > 3


def test_a_loop_ends_with_what_the_tool_gave(called: Running) -> None:
    model = chat(called, model="skydraft-lossless").bind_tools([pick_city])
    turns = [messages.HumanMessage("天"), model.invoke("天")]
    (call,) = turns[1].tool_calls
    assert call["args"] == {"city": "上海", "days": 3}
    turns.append(messages.ToolMessage(pick_city(**call["args"]), tool_call_id=call["id"]))
    last = model.invoke(turns)
    assert last.content == "done" and not last.tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_is_a_pydantic_model(served: Running, method: str, temperature: float) -> None:
    model = chat(served, max_tokens=ENOUGH, temperature=temperature).with_structured_output(Voice, method=method)
    got = model.invoke(QUESTION)
    assert isinstance(got, Voice) and got.speed in ("快", "慢")


def test_what_is_refused_is_an_error_of_its_own_kind(served: Running) -> None:
    with pytest.raises(exceptions.ModelNotFoundError, match="skydraft-lossless"):
        chat(served, model="gpt-9").invoke(QUESTION)
    with pytest.raises(exceptions.ModelInvalidRequestError, match="grammar does not compile"):
        chat(served, model_kwargs={"response_format": NOTHING_FITS}).invoke(QUESTION)
    with pytest.raises(exceptions.ContextOverflowError):
        chat(served).invoke(TOO_LONG)
