"""The commands of docs/servers.md, with toys and imitations in place of the models and servers that they name."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from skydraft.cli.main import run

from ..docs.pages import blocks_of, commands_of
from .fakes import fake

COMMANDS = [
    shlex.split(command.replace("\\\n", ""))[1:]
    for block in blocks_of("docs/servers.md")
    for command in commands_of(block)
    if command.startswith("skydraft ")
]
KINDS = {"http://gpu-box:8000/v1": "vllm", "http://localhost:8000/v1": "vllm", "http://localhost:8080": "llama-server",
         "https://api.example/v1": "openai"}  # fmt: skip


def test_the_page_has_commands() -> None:
    assert {command[0] for command in COMMANDS} == {"generate", "doctor", "gateway"}


@pytest.mark.parametrize("command", [each for each in COMMANDS if each[0] != "gateway"], ids=" ".join)
def test_a_command_works(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("key").write_text("secret\n")
    Path("key").chmod(0o600)
    address = next(each for each in command if each in KINDS)
    with fake(KINDS[address]) as server:
        here = [{address: server.url, "MODEL": "toy"}.get(each, each) for each in command]
        assert run([*here, "--edge-model", "toy:drift=0.2"]) == 0
    out, err = capsys.readouterr()
    assert out and "Traceback" not in err and "secret" not in out + err
    assert server.model.num_written or command[0] == "doctor"
