"""openai-agents out of the box: it speaks to `/v1/responses`, and its loops call tools."""

import asyncio
from typing import Any, Literal

import pytest

from tests.gateway.interfaces import forced
from tests.gateway.running import Running

from .conftest import CONVERSATION, QUESTION, expected, pick_city

agents: Any = pytest.importorskip("agents", reason="openai-agents is not installed")
openai: Any = pytest.importorskip("openai")

pytestmark = [pytest.mark.conformance, pytest.mark.filterwarnings("default")]


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
