"""Coding agents as people install them: each makes one edit in a repository of its own, without a request refused.

The target is a toy that writes what a model would, so the agent's loop, its requests and its edit are real, and the
words are not. Left out where npm has not installed the agents (`make test-conformance` does).
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of
from tests.gateway.interfaces import call_text
from tests.gateway.running import Running, gateway, scripted_pair

pytestmark = [pytest.mark.conformance, pytest.mark.filterwarnings("default")]
MODULES = Path(__file__).parent / "javascript" / "node_modules"
MODEL, PATIENCE_S = "skydraft-lossless", 240
CONTEXT = 400_000  # of the toy, whose tokens are bytes


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "repository"
    path.mkdir()
    (path / "hello.py").write_text("print('hello')\n")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b.example commit -qm a"):
        subprocess.run(["git", *command.split()], cwd=path, check=True)
    yield path


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
