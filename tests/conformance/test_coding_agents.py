"""Coding agents as people install them: each makes one edit in a repository of its own, without a request refused.

The target is a toy that writes what a model would, so the agent's loop, its requests and its edit are real, and the
words are not. Left out where npm has not installed the agents (`make test-conformance` does).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.interfaces import call_text
from tests.gateway.running import Running, gateway
from tests.gateway.scripted import scripted_pair

pytestmark = [pytest.mark.conformance, pytest.mark.filterwarnings("default")]
MODULES = Path(__file__).parent / "javascript" / "node_modules"
TASK, MODEL, PATIENCE_S = "Replace hello by goodbye in hello.py.", "skydraft-lossless", 240
CONTEXT = 400_000  # of the toy, whose tokens are bytes


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "repository"
    path.mkdir()
    (path / "hello.py").write_text("print('hello')\n")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b.example commit -qm a"):
        subprocess.run(["git", *command.split()], cwd=path, check=True)
    yield path


def run(command: list[str], repository: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run an agent there, with a home of its own."""
    home = repository.parent / "home"
    home.mkdir(exist_ok=True)
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    return subprocess.run(
        command, cwd=repository, env={**kept, "HOME": str(home), **variables}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip


def codex(served: Running, repository: Path) -> subprocess.CompletedProcess[str]:
    program = MODULES / ".bin" / "codex"
    if not program.exists():
        pytest.skip("Codex is not installed")
    settings = {
        "model": MODEL, "model_provider": "skydraft", "model_context_window": CONTEXT,
        "model_providers.skydraft": {"name": "skydraft", "base_url": served.v1, "wire_api": "responses"},
    }  # fmt: skip
    options = [f"-c{name}={_as_toml(value)}" for name, value in settings.items()]
    free = "--dangerously-bypass-approvals-and-sandbox"  # the script is ours
    return run([str(program), "exec", free, *options, TASK], repository)


def _as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}={_as_toml(each)}" for name, each in value.items()) + "}"
    return json.dumps(value)


def claude_code(served: Running, repository: Path) -> subprocess.CompletedProcess[str]:
    program = MODULES / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs"
    if not program.exists() or not shutil.which("node"):
        pytest.skip("Claude Code is not installed")
    told = {
        "ANTHROPIC_BASE_URL": served.url, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL, "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }  # fmt: skip
    return run(["node", str(program), "-p", TASK, "--permission-mode", "acceptEdits"], repository, **told)


def steps_of(agent: Any, repository: Path) -> list[str]:
    path = str(repository / "hello.py")
    if agent is codex:
        return [call_text("exec_command", {"cmd": "sed -i s/hello/goodbye/ hello.py"}), "It is done."]
    edit = {"file_path": path, "old_string": "hello", "new_string": "goodbye"}
    return [call_text("Read", {"file_path": path}), call_text("Edit", edit), "It is done."]


def num_refused(served: Running) -> int:
    return served.client.get(f"{served.url}/metrics").text.count("skydraft_gateway_refusals_total{")


@pytest.mark.parametrize("agent", [codex, claude_code])
def test_an_agent_makes_one_edit_and_nothing_is_refused(agent: Any, repository: Path) -> None:
    with gateway(scripted_pair(steps_of(agent, repository), CONTEXT)) as served:
        done = agent(served, repository)
        assert (repository / "hello.py").read_text() == "print('goodbye')\n", done.stdout + done.stderr
        assert done.returncode == 0 and "It is done." in done.stdout and not num_refused(served)


@pytest.mark.parametrize(("agent", "said"), [(codex, "out of room in the model's context"), (claude_code, "too long")])
def test_an_agent_understands_that_its_prompt_is_too_long(agent: Any, said: str, repository: Path) -> None:
    """It says so in its own words, in which it would compact a conversation that is longer than this one."""
    with gateway(scripted_pair(["done"], 4096)) as served:
        done = agent(served, repository)
        assert said in done.stdout + done.stderr, done.stdout + done.stderr
