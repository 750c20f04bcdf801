"""Tools over a scripted pair, as clients call them that have no test of their own: each loop is the client's own."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.interfaces import call_text
from tests.gateway.running import gateway, scripted_pair

pytestmark = [pytest.mark.conformance, pytest.mark.filterwarnings("default")]
MODEL, QUESTION, SAID = "skydraft-lossless", "上海今天天气怎么样？", "晴，25 度"
SCRIPT = Path(__file__).parent / "javascript" / "loop.mjs"
asked: list[str] = []  # cities


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    steps = [call_text("get_weather", {"city": "上海"}), "It is sunny."]
    with gateway(scripted_pair(steps, 20_000)) as running:
        yield running.v1


def get_weather(city: str) -> str:
    """The weather of a city."""
    asked.append(city)
    return SAID


def by_pydantic_ai(url: str) -> str:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    model = models.OpenAIChatModel(MODEL, provider=providers.OpenAIProvider(base_url=url, api_key="none"))
    return str(pydantic_ai.Agent(model, tools=[get_weather]).run_sync(QUESTION).output)


def by_javascript(client: str, url: str) -> str:
    node = shutil.which("node")
    if node is None or not (SCRIPT.parent / "node_modules").exists():
        pytest.skip("node or its packages are not there")
    command = [node, str(SCRIPT), client, url, MODEL, QUESTION, SAID]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    asked.extend(found["cities"])
    return str(found["answer"])


LOOPS: dict[str, Callable[[str], str]] = {
    "pydantic-ai": by_pydantic_ai,
    "openai": partial(by_javascript, "openai"),
    "ai": partial(by_javascript, "ai"),
    "ai, over responses": partial(by_javascript, "ai-openai"),
}


@pytest.mark.parametrize("client", LOOPS)
def test_a_tool_is_called_and_the_loop_ends_in_a_sentence(url: str, client: str) -> None:
    asked.clear()
    assert LOOPS[client](url) == "It is sunny." and asked == ["上海"]
