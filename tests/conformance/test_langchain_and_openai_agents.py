"""LangChain (langchain-openai) against a running gateway.

openai-agents out of the box: it speaks to `/v1/responses`, and its loops call tools.
"""

import asyncio
from typing import Any, Literal

import pytest

from tests.gateway.interfaces import forced
from tests.gateway.running import Running

from .conftest import CONVERSATION, MAX_TOKENS, MODEL, QUESTION, SEED, TOO_LONG, expected, pick_city

langchain_openai: Any = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
exceptions: Any = pytest.importorskip("langchain_core.exceptions", reason="langchain-core is not installed")
messages: Any = pytest.importorskip("langchain_core.messages", reason="langchain-core is not installed")
agents: Any = pytest.importorskip("agents", reason="openai-agents is not installed")
openai: Any = pytest.importorskip("openai")

pytestmark = [pytest.mark.conformance, pytest.mark.filterwarnings("default")]


def chat(served: Running, **options: Any) -> Any:
    """A chat model at the gateway."""
    given = {"model": MODEL, "temperature": 0, "seed": SEED, "max_tokens": MAX_TOKENS, "max_retries": 0} | options
    return langchain_openai.ChatOpenAI(base_url=served.v1, api_key="none", **given)


def test_an_answer_and_its_usage_whole_and_streamed(served: Running) -> None:
    want, asked = expected(CONVERSATION), messages.convert_to_messages(CONVERSATION)
    got, chunks = chat(served).invoke(asked), list(chat(served, stream_usage=True).stream(asked))
    assert got.content == want.text and got.response_metadata["finish_reason"] == "length"
    assert "".join(chunk.content for chunk in chunks) == want.text
    assert sum(bool(chunk.content) for chunk in chunks) > 1  # it came in parts
    used = [each.usage_metadata for each in (got, *chunks) if each.usage_metadata]
    numbers = want.num_prompt_tokens, MAX_TOKENS
    assert [(each["input_tokens"], each["output_tokens"]) for each in used] == [numbers] * 2


def test_what_is_refused_is_an_error_of_its_own_kind(served: Running) -> None:
    with pytest.raises(exceptions.ModelNotFoundError, match="skydraft-lossless"):
        chat(served, model="gpt-9").invoke(QUESTION)
    with pytest.raises(exceptions.ContextOverflowError):
        chat(served).invoke(TOO_LONG)


def run(served: Running, asked: Any = QUESTION, *, streams: bool = False, more: Any = None, **options: Any) -> Any:
    """The result of an agent at the gateway, and the text of its stream. It has no key for traces of OpenAI's."""

    async def go() -> tuple[Any, str]:
        async with openai.AsyncOpenAI(base_url=served.v1, api_key="none", max_retries=0) as client:
            model = agents.OpenAIResponsesModel(model="skydraft-lossless", openai_client=client)
            settings = agents.ModelSettings(**{"temperature": 0} | (more or {}))
            agent = agents.Agent(name="a", model=model, model_settings=settings, **options)
            if not streams:
                return await agents.Runner.run(agent, asked, max_turns=3), ""
            running, text = agents.Runner.run_streamed(agent, asked, max_turns=3), ""
            async for event in running.stream_events():
                if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                    text += event.data.delta
            return running, text

    agents.set_tracing_disabled(True)
    return asyncio.run(go())


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_a_conversation_and_its_usage(served: Running, streams: bool) -> None:
    first, *rest = CONVERSATION
    said = {"extra_body": forced("快慢")}  # an answer that is cut would be an error to an agent
    done, text = run(served, rest, instructions=first["content"], more=said, streams=streams)
    assert done.final_output == "快慢" and text == ("快慢" if streams else "")
    used = done.raw_responses[0].usage
    assert used.input_tokens == expected(CONVERSATION).num_prompt_tokens and used.output_tokens > 1


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("choice", [None, "required"])
def test_a_loop_calls_a_tool_and_ends_with_a_text(called: Running, streams: bool, choice: str | None) -> None:
    asked: list[tuple[str, int]] = []

    @agents.function_tool(name_override="pick_city")
    def pick(city: Literal["上海", "北京"], days: Literal[1, 2, 3]) -> str:
        """Pick a city for some days."""
        asked.append((city, days))
        return pick_city(city, days)

    more = {"tool_choice": choice, "parallel_tool_calls": False}
    done, _ = run(called, tools=[pick], more=more, streams=streams)
    assert done.final_output == "done" and len(asked) == 1
    assert asked == [("上海", 3)] or choice  # the toy's one token for this call fits no grammar
