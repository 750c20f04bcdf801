"""Tools on the demo pair, as the agents of other people call them: with `auto`, and where a call is required.

Each loop is the client's own and ends by itself, in a sentence with what the tool found. The gateway runs in the
environment of `make setup`, since the clients pin packages that ours are newer than.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pydantic
import pytest

# Long, so not in every run: what a real pair says of a result may differ from processor to processor.
pytestmark = [pytest.mark.conformance, pytest.mark.model, pytest.mark.long, pytest.mark.filterwarnings("default")]
ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("SKYDRAFT_PYTHON", ROOT / ".venv/bin/python"))
OPTIONS = ("--port", "0", "--threads", "1", "--context", "2048", "--parallel", "1", "--keep", "1")
MODEL, QUESTION, SAID = "skydraft", "上海今天天气怎么样？", "晴，25 度"
MAX_TOKENS, MAX_TURNS, PATIENCE_S = 512, 6, 240.0
asked: list[str] = []  # cities


def get_weather(city: str) -> str:
    """查询一个城市今天的天气

    Args:
        city: 城市的名字
    """
    asked.append(city)
    return SAID


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "查询一个城市今天的天气",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a gateway over the demo pair."""
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is not there: run make setup")
    command = [str(PYTHON), "-c", "import skydraft_command; skydraft_command.main()", "gateway", *OPTIONS]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr
        printed = ""
        while "Ctrl-C stops." not in printed:
            line = process.stderr.readline()
            if not line:
                status = process.wait(timeout=60)
                assert status > 0 and "Traceback" not in printed, f"the gateway broke ({status}): {printed}"
                pytest.skip(f"the gateway did not start: {printed}")
            printed += line
        found = re.search(r"http://localhost:\d+/v1", printed)
        assert found
        yield found[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def by_pydantic_ai(url: str, choice: str) -> str:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    model = models.OpenAIChatModel(MODEL, provider=providers.OpenAIProvider(base_url=url, api_key="none"))
    # An output that is a tool's makes it ask for a call each time.
    kind = {"tools": [get_weather]} if choice == "auto" else {"output_type": pydantic_ai.ToolOutput(get_weather)}
    agent = pydantic_ai.Agent(model, **kind)
    limits = pydantic_ai.UsageLimits(request_limit=MAX_TURNS)
    return str(agent.run_sync(QUESTION, model_settings={"max_tokens": MAX_TOKENS}, usage_limits=limits).output)


def by_inspect_ai(url: str, choice: str) -> str:
    pytest.importorskip("inspect_ai")
    models = pytest.importorskip("inspect_ai.model")
    tools = pytest.importorskip("inspect_ai.tool")
    definition = tools.ToolDef(_weather_later, "get_weather", TOOL["function"]["description"], {"city": "城市的名字"})
    model = models.get_model(f"openai-api/sky/{MODEL}", base_url=url, api_key="none")

    async def loop() -> str:
        messages: list[Any] = [models.ChatMessageUser(content=QUESTION)]
        config = models.GenerateConfig(max_tokens=MAX_TOKENS, parallel_tool_calls=False)
        turn_choice = "any" if choice == "required" else choice
        for _ in range(MAX_TURNS):
            answer = await model.generate(messages, tools=[definition], tool_choice=turn_choice, config=config)
            messages.append(answer.message)
            if not answer.message.tool_calls:
                break
            messages += (await models.execute_tools(messages, [definition])).messages
            turn_choice = "auto"
        return str(answer.completion)

    return asyncio.run(loop())


async def _weather_later(city: str) -> str:
    return get_weather(city)


class Weather(pydantic.BaseModel):
    """查询一个城市今天的天气"""

    city: str


def by_instructor(url: str, choice: str) -> str:
    """It returns what tools would be given, so that there is no second turn."""
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    parallel = choice == "auto"
    client = instructor.from_openai(
        openai.OpenAI(base_url=url, api_key="none", timeout=PATIENCE_S),
        mode=instructor.Mode.PARALLEL_TOOLS if parallel else instructor.Mode.TOOLS,
    )
    found = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], max_retries=0, max_tokens=MAX_TOKENS,
        response_model=Iterable[Weather] if parallel else Weather,
    )  # fmt: skip
    return "".join(get_weather(each.city) for each in (found if parallel else [found]))


def by_javascript(client: str, url: str, choice: str) -> str:
    node, script = shutil.which("node"), ROOT / "tests/conformance/javascript/loop.mjs"
    if node is None or not (script.parent / "node_modules").exists():
        pytest.skip("node or its packages are not there")
    words = [node, str(script), client, url, MODEL, QUESTION, choice, SAID]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    asked.extend(found["cities"])
    return str(found["answer"])


by_openai_js, by_vercel_ai = partial(by_javascript, "openai"), partial(by_javascript, "ai")
by_vercel_ai_responses = partial(by_javascript, "ai-openai")

LOOPS: dict[str, Callable[[str, str], str]] = {
    name.removeprefix("by_"): loop
    for name, loop in list(globals().items())
    if name.startswith("by_") and name != "by_javascript"
}


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("client", LOOPS)
def test_a_tool_is_called_and_the_loop_ends_in_a_sentence(url: str, client: str, choice: str) -> None:
    asked.clear()
    answer = LOOPS[client](url, choice)
    assert asked[:1] == ["上海"], (asked, answer)  # where calls may be several, `required` goes on to other cities
    assert "25" in answer and "tool_" not in answer and '"arguments"' not in answer
