"""Coding agents as people install them: each makes one edit in a repository of its own, without a request refused.

The target is a toy that writes what a model would, so the agent's loop, its requests and its edit are real, and the
words are not. Left out where npm has not installed the agents (`make test-conformance` does).

Tools over a scripted pair, as clients call them that have no test of their own: each loop is the client's own.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import blocks_of
from tests.gateway.interfaces import call_text
from tests.gateway.running import Running, gateway, scripted_pair

pytestmark = [pytest.mark.conformance, pytest.mark.filterwarnings("default")]
MODULES = Path(__file__).parent / "javascript" / "node_modules"
MODEL, PATIENCE_S = "skydraft-lossless", 240
CONTEXT = 400_000  # of the toy, whose tokens are bytes
QUESTION, SAID = "上海今天天气怎么样？", "晴，25 度"
SCRIPT = Path(__file__).parent / "javascript" / "loop.mjs"
asked: list[str] = []  # cities


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "repository"
    path.mkdir()
    (path / "hello.py").write_text("print('hello')\n")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b.example commit -qm a"):
        subprocess.run(["git", *command.split()], cwd=path, check=True)
    yield path


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    steps = [call_text("get_weather", {"city": "上海"}), "It is sunny."]
    with gateway(scripted_pair(steps, 20_000)) as running:
        yield running.v1


def follow(agent: str, served: Running, repository: Path) -> subprocess.CompletedProcess[str]:
    """Run the block of docs/agents.md for this agent, with another port, context and model, and a home of its own."""
    block = next(block.text for block in blocks_of("docs/agents.md") if f"\n{agent} " in block.text)
    others = {
        "http://localhost:8137": served.url, "32768": str(CONTEXT), "skydraft-lossless": MODEL,
        "--sandbox workspace-write": "--dangerously-bypass-approvals-and-sandbox",  # the script is ours
    }  # fmt: skip
    for printed, other in others.items():
        block = block.replace(printed, other)
    home = repository.parent / "home"
    home.mkdir()
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    kept["PATH"] = f"{installed(agent, repository.parent / 'bin')}:{kept['PATH']}"
    return subprocess.run(
        ["bash", "-ec", block], cwd=repository, env={**kept, "HOME": str(home)}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip


def installed(agent: str, folder: Path) -> Path:
    """A folder with the agent. Claude Code's own program needs a script of its package, which npm may not run."""
    scripts = {"codex": "@openai/codex/bin/codex.js", "claude": "@anthropic-ai/claude-code/cli-wrapper.cjs"}
    script = MODULES / scripts[agent]
    if not script.exists() or not shutil.which("node"):
        pytest.skip(f"{agent} is not installed")
    folder.mkdir()
    (folder / agent).write_text(f'#!/bin/sh\nexec node "{script}" "$@"\n')
    (folder / agent).chmod(0o755)
    return folder


def steps_of(agent: str, repository: Path) -> list[str]:
    path = str(repository / "hello.py")
    if agent == "codex":
        return [call_text("exec_command", {"cmd": "sed -i s/hello/goodbye/ hello.py"}), "It is done."]
    edit = {"file_path": path, "old_string": "hello", "new_string": "goodbye"}
    return [call_text("Read", {"file_path": path}), call_text("Edit", edit), "It is done."]


def num_refused(served: Running) -> int:
    return served.client.get(f"{served.url}/metrics").text.count("skydraft_gateway_refusals_total{")


@pytest.mark.parametrize("agent", ["codex", "claude"])
def test_an_agent_makes_one_edit_and_nothing_is_refused(agent: str, repository: Path) -> None:
    with gateway(scripted_pair(steps_of(agent, repository), CONTEXT)) as served:
        done = follow(agent, served, repository)
        assert (repository / "hello.py").read_text() == "print('goodbye')\n", done.stdout + done.stderr
        assert done.returncode == 0 and "It is done." in done.stdout and not num_refused(served)


@pytest.mark.parametrize(("agent", "said"), [("codex", "out of room in the model's context"), ("claude", "too long")])
def test_an_agent_understands_that_its_prompt_is_too_long(agent: str, said: str, repository: Path) -> None:
    """It says so in its own words, in which it would compact a conversation that is longer than this one."""
    with gateway(scripted_pair(["done"], 4096)) as served:
        done = follow(agent, served, repository)
        assert said in done.stdout + done.stderr, done.stdout + done.stderr


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
