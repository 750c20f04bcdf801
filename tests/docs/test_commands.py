"""Every block of the pages that a user follows is run as it is printed, or is listed here with the reason why not."""

import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from .pages import Reader, blocks_of, commands_of

_DOCS = "try chat modes gateway interface python two-machines measuring reproduce tasks speech learning models security"
PAGES = ("README.md", *(f"docs/{name}.md" for name in _DOCS.split()))

# First lines of blocks that show what a command prints, and of one with a test of its own, tests/docs/test_service.py.
# What the real pair writes is tested in tests/real_pair.
SHOWN = {
    "1. An edit. … The same text as the large model alone, at 1.2 times its speed …",
    '{"file": "data/speech_zh_heldout/demo-fast-loud-woman.flac", "text": "这段录音里说话的是一位女士，…", …}',
    "# service.py, for: uvicorn service:app",
}
# Beginnings of commands that a test cannot run, and why, or where else they are tested.
NOT_RUN = {
    "make ": "installs, downloads, compiles, or runs this test",
    "pip ": "installed by make setup; tests/test_installs.py",
    "apt install bubblewrap": "tests/evaluation/test_sandbox.py",
    "CMAKE_ARGS=-DGGML_CUDA=on pip ": "needs CUDA, and compiles for minutes",
    'eval "$(_SKYDRAFT_COMPLETE=bash_source skydraft)"': "tests/cli/test_commands.py",
    "skydraft doctor\n": "finds that the models are not here: tests/cli/test_doctor.py",
    "skydraft chat --edge-model ollama:": "tests/models/test_found.py",
    "skydraft models fetch ": "downloads 1.6 GB; tests/models",
    "skydraft models quantize ": "downloads 0.5 GB; tests/engines/test_llamacpp.py",
    "skydraft generate --edge-model qwen2.5-coder-0.5b-q4_0 ": "the same",
    "skydraft generate --edge-model none ": "tests/engines/test_llamacpp.py",
    "skydraft caption clips/*.wav --edge-model Qwen": "the published weights and CUDA are not here",
    "skydraft learn r": "a toy cannot be trained: tests/learning",
    'skydraft generate "房间很干净。" --adapter ': "the same",
    "skydraft compare --prompts others.txt --adapter ": "the same",
    "lm_eval --model local-completions --tasks arc_easy --model_args ": "lm-eval; tests/gateway/test_openai_sdk.py",
    "export OPENAI_API_BASE_URL=": "tests/gateway/test_desk_and_agents.py",
    "open-webui serve": "the same",
}
# What docs/two-machines.md makes for a server and a device.
_FILES = (
    "export CLOUD=cloud.example",
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -keyout key.pem -out cert.pem "
    '-subj "/CN=$CLOUD" -addext "subjectAltName=DNS:$CLOUD"',
    'echo "phone $(openssl rand -hex 24)" | tee token > tokens',
)
_SERVE = "skydraft serve --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem --token-file tokens"
# What a reader has done before a block whose first line begins so: (page, beginning) -> commands.
BEFORE = {
    # The demo pair's calibration comes along, the toys' does not.
    ("docs/modes.md", 'skydraft generate "What is edge computing?" --mode auto'): (
        "skydraft calibrate --prompts data/prompts_zh_fit.jsonl",
    ),
    ("docs/gateway.md", 'skydraft gateway --cloud "$CLOUD:7373" --tls-ca cert.pem'): (*_FILES, _SERVE),
    ("docs/security.md", _SERVE): _FILES,
    ("docs/models.md", "skydraft models remove "): (
        'mkdir -p "$SKYDRAFT_HOME/models"',
        'echo GGUF > "$SKYDRAFT_HOME/models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf.partial"',
    ),
    ("docs/measuring.md", "skydraft compare --prompts data/prompts_zh_dev.jsonl --limit 2 "): ("skydraft serve",),
}  # fmt: skip
# The block with which a page goes on to the other machine.
ON_THE_DEVICE = {("docs/two-machines.md", 'scp "$CLOUD:cert.pem" .')}
NEEDS = ("uvicorn", "llguidance", "matplotlib", "torch", "soundfile", "openai")
# What a block has to print; blocks that are not here have to succeed.
PRINTS = {
    """printf '%s\\n' "用一句话描述清晨的公园。" "What is a hash table?" > mine.txt""": "report.html",
    _SERVE: "TLS, a token is",
    "curl http://localhost:8137/v1/chat/completions -H 'Content-Type: application/json' -d '{": '"finish_reason"',
    "skydraft models path": "tiny_omni/edge",
    'skydraft generate "Describe a vacuum flask in one sentence." --mode quality --learn lessons': "1 answer",
}  # fmt: skip


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reading = Reader(tmp_path / "reader")
    yield reading
    reading.leave()


def before(page: str, line: str) -> tuple[str, ...]:
    return next((commands for (at, begins), commands in BEFORE.items() if at == page and line.startswith(begins)), ())


def follow(reader: Reader, page: str) -> dict[str, str]:
    """Follow the whole page; returns what the blocks printed, by their first lines."""
    printed = defaultdict[str, str](str)
    for block in blocks_of(page):
        if any((page, line) in ON_THE_DEVICE for line in block.text.splitlines()):
            reader.here = reader.device
        if block.first_line not in SHOWN:
            for command in before(page, block.first_line):
                reader.run(command)
            printed[block.first_line] += reader.follow(block, tuple(NOT_RUN))
    return printed


@pytest.mark.parametrize("page", PAGES)
def test_a_page_can_be_followed_as_it_is_printed(page: str, reader: Reader) -> None:
    if not all(map(shutil.which, ("openssl", "curl"))):
        pytest.skip("there is no openssl or no curl, which pages use")
    for module in NEEDS:
        pytest.importorskip(module)
    printed = follow(reader, page)
    for first_line, text in printed.items():
        assert PRINTS.get(first_line, "") in text, first_line
    if page == "docs/gateway.md":
        assert "[accepted]" in printed["from openai import OpenAI"]
    if page == "docs/python.md":
        assert "accepted" in printed["import skydraft"] and "calls/token" in printed["import skydraft"]
    if page == "docs/security.md":  # its last block took the token back
        time.sleep(1.5)  # the server looks at its tokens once a second
        given = '--mode lossless --cloud "$CLOUD:7373" --tls-ca cert.pem --cloud-token-file token'
        assert "token" in reader.run(f"skydraft generate 你好 {given}", fails=True)


def test_the_lists_name_nothing_that_the_pages_no_longer_have() -> None:
    blocks = [(page, block) for page in PAGES for block in blocks_of(page)]
    shell = [block for _, block in blocks if block.first_line not in SHOWN and block.language != "python"]
    commands = [f"{command}\n" for block in shell for command in commands_of(block)]
    assert [begin for begin in NOT_RUN if not any(command.startswith(begin) for command in commands)] == []
    assert SHOWN | set(PRINTS) <= {block.first_line for _, block in blocks}
    assert set(BEFORE.values()) <= {before(page, block.first_line) for page, block in blocks}
    assert {line for _, line in ON_THE_DEVICE} <= {line for _, block in blocks for line in block.text.splitlines()}
