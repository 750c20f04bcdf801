"""LiteLLM against a running gateway."""

import os
from typing import Any

import pytest

from tests.gateway.running import Running

from .conftest import ASKED, MAX_TOKENS, MODEL, SEED, TOO_LONG, expected

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import looks for a list of prices online
litellm: Any = pytest.importorskip("litellm", reason="litellm is not installed")

pytestmark = [pytest.mark.conformance, pytest.mark.filterwarnings("default")]


def options(served: Running, **more: Any) -> dict[str, Any]:
    """What `litellm.completion` takes."""
    given: dict[str, Any] = {
        "model": f"openai/{MODEL}", "api_base": served.v1, "api_key": "none", "messages": ASKED, "temperature": 0,
        "seed": SEED, "max_tokens": MAX_TOKENS, "max_retries": 0,
    }  # fmt: skip
    return given | more


def test_an_answer_and_its_usage_whole_and_streamed(served: Running) -> None:
    want = expected()
    got = litellm.completion(**options(served))
    assert got.choices[0].message.content == want.text and got.choices[0].finish_reason == "length"
    assert got.skydraft["origins"] == list(want.origins)
    chunks = list(litellm.completion(**options(served, stream=True, stream_options={"include_usage": True})))
    assert len(chunks) > 4  # it came in parts
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == want.text
    used = [each.usage for each in (got, *chunks) if getattr(each, "usage", None)]
    assert [(each.prompt_tokens, each.completion_tokens) for each in used] == [(want.num_prompt_tokens, MAX_TOKENS)] * 2


def test_what_is_refused_is_an_error_of_its_own_kind(served: Running) -> None:
    with pytest.raises(litellm.NotFoundError, match="skydraft-lossless"):
        litellm.completion(**options(served, model="openai/gpt-9"))
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**options(served, messages=[{"role": "user", "content": TOO_LONG}]))
