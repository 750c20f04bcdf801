"""LangChain (langchain-openai) against a running gateway."""

from typing import Any

import pytest

from tests.gateway.running import Running

from .conftest import CONVERSATION, MAX_TOKENS, MODEL, QUESTION, SEED, TOO_LONG, expected

langchain_openai: Any = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
exceptions: Any = pytest.importorskip("langchain_core.exceptions", reason="langchain-core is not installed")
messages: Any = pytest.importorskip("langchain_core.messages", reason="langchain-core is not installed")

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
