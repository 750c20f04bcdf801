"""llm, the command and its Python interface, against a running gateway that stands in its extra-openai-models.yaml."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.running import PATIENCE_S, Running

from .conftest import ENOUGH, MAX_TOKENS, MODEL, QUESTION, SEED, expected

llm: Any = pytest.importorskip("llm", reason="llm is not installed")
openai: Any = pytest.importorskip("openai", reason="openai is not installed")

pytestmark = [pytest.mark.conformance, pytest.mark.filterwarnings("default")]
OPTIONS: dict[str, Any] = {"temperature": 0, "seed": SEED, "max_tokens": MAX_TOKENS}
_MODELS = """
- model_id: sky
  model_name: {model}
  api_base: {url}
  supports_tools: true
- model_id: caller
  model_name: skydraft-lossless
  api_base: {called}
  supports_tools: true
"""


@pytest.fixture
def home(served: Running, called: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of llm's own that knows the gateway."""
    (tmp_path / "extra-openai-models.yaml").write_text(_MODELS.format(model=MODEL, url=served.v1, called=called.v1))
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    yield tmp_path


def run(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """The command, as a user calls it."""
    options = [text for name, value in (OPTIONS | more).items() for text in ("-o", name, str(value))]
    return subprocess.run(
        [sys.executable, "-m", "llm", *arguments, *options], capture_output=True, text=True, env=os.environ,
        timeout=2 * PATIENCE_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_the_command_writes_the_same_answer_plain_and_streamed(home: Path) -> None:
    want = expected()
    for more in ([], ["--no-stream"]):
        done = run("-m", "sky", QUESTION, "-u", *more)
        assert done.stdout.removesuffix("\n") == want.text, done.stderr
        assert f"{want.num_prompt_tokens} input, {MAX_TOKENS} output" in done.stderr


def test_the_command_calls_tools_until_there_is_an_answer(home: Path) -> None:
    source = 'def pick_city(city: str, days: int) -> str:\n    "Pick a city."\n    return f"{city} {days * 7}"\n'
    done = run("-m", "caller", "天", "--functions", source, "--td", max_tokens=ENOUGH)
    assert done.stdout.endswith("done\n") and "上海 21" in done.stderr, done.stderr
