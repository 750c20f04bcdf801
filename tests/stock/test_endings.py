"""How a text ends that a server does not end well: by its filter, by an error, by a break, in one burst with text or
without any. What was written is kept."""

import json
from typing import Any

import pytest

from skydraft.lab.learning.collect import lesson_of
from skydraft.lab.learning.lessons import UNJUDGED
from tests.hostile.texts import ALONE, LENGTH, STREAMS, TARGET, assert_all_is_accounted_for
from tests.stock import faults
from tests.stock.conftest import Spoilt
from tests.stock.faults import Fault

NUM = 3  # events with text in each answer


def end(finish: str | None = None, **said: Any) -> bytes:
    choice = {"index": 0, "delta": {}, "text": "", "token_ids": [], "finish_reason": finish}
    return b"data: " + json.dumps({"id": "", "choices": [choice], **said}).encode() + b"\n\n"


ENDS: dict[str, Fault] = {
    "an end without a reason": faults.bursts(NUM, b"data: [DONE]\n\n"),
    "an end without [DONE]": faults.bursts(NUM),
    "OpenRouter: an error": faults.bursts(NUM, end("error", error={"code": "server_error", "message": "gone"})),
    "OpenRouter: 502": faults.bursts(NUM, b'data: {"choices": [], "error": {"code": 502, "message": "full"}}\n\n'),
    "DeepInfra: an error of its own": faults.bursts(
        NUM, b'data: {"choices": null, "error_type": "E", "error_message": "full"}\n\ndata: [DONE]\n\n'
    ),
    "llama-server: the field error": faults.bursts(NUM, b'error: {"code": 500, "message": "x"}\n\ndata: [DONE]\n\n'),
    "an error without a field": faults.bursts(NUM, b'{"error": {"code": 500, "message": "x"}}'),
    "words without a field": faults.bursts(NUM, b"upstream error: read ECONNRESET\n"),
    "a page": faults.bursts(NUM, b"data: <html>\n\n"),
    "network_error": faults.bursts(NUM, end("network_error") + b"data: [DONE]\n\n"),
    "insufficient_system_resource": faults.bursts(NUM, end("insufficient_system_resource")),
    "a break": faults.bursts(NUM, breaks=True),
    "a break within an event": faults.bursts(NUM, b'data: {"choi', breaks=True),
}


@pytest.mark.parametrize("plan", ["cloud", "checked", "hand-back"])
@pytest.mark.parametrize("name", ENDS)
def test_what_came_before_a_bad_end_is_kept(name: str, plan: str, spoilt: Spoilt) -> None:
    """54 tokens took 40 requests: each brought a token, whatever else had come with it."""
    (_, num_sound), (generation, num_asked) = spoilt("vllm", plan), spoilt("vllm", plan, ENDS[name])
    assert_all_is_accounted_for(generation)
    assert generation.token_ids == ALONE and "edge-fallback" not in generation.origins
    assert num_asked <= num_sound + len(ALONE) / (NUM - 1)


@pytest.mark.parametrize("name", ENDS)
def test_the_draft_model_goes_on_where_a_chat_ends_badly(name: str, spoilt: Spoilt) -> None:
    """The first event of this chat has no text."""
    generation, num_asked = spoilt("chat", "lossless", ENDS[name])
    assert_all_is_accounted_for(generation)
    assert list(generation.origins) == ["cloud"] * (NUM - 1) + ["edge-fallback"] * (LENGTH - NUM + 1) and num_asked == 1


def refused(status: int, **error: Any) -> Fault:
    return faults.refuses(status, json.dumps({"error": error}))


FILTERS: dict[str, Fault] = {
    "in an event of its own": faults.bursts(NUM, end("content_filter") + b"data: [DONE]\n\n"),
    "Zhipu: sensitive": faults.bursts(NUM, end("sensitive") + b"data: [DONE]\n\n"),
    "Gemini: with the reason": faults.bursts(NUM, end("content_filter: SAFETY")),
    "Gemini's own": faults.bursts(NUM, end("PROHIBITED_CONTENT")),
    "DashScope: an error": faults.bursts(
        NUM, end(error={"code": "data_inspection_failed", "message": "Output data may contain inappropriate content."})
    ),
    "LiteLLM: an error": faults.bursts(NUM, end(error={"code": "400", "message": "ContentPolicyViolationError: no"})),
}
REFUSED: dict[str, Fault] = {
    "Azure": refused(400, code="content_filter", message="The response was filtered.", type=None, param="prompt"),
    "DeepSeek": refused(400, code="invalid_request_error", type="invalid_request_error", message="Content Exists Risk"),
    "Moonshot": refused(400, type="content_filter", message="The request was rejected: considered high risk"),
    "DashScope": refused(400, message="<400> InternalError.Algo.DataInspectionFailed: Input text data may contain …"),
    "Zhipu": refused(400, code="1301", message="系统检测到输入或生成内容可能包含不安全或敏感内容"),
    "at once": faults.tells({"id": "", "choices": [{"index": 0, "delta": {}, "finish_reason": "content_filter"}]}),
}


@pytest.mark.parametrize("plan", STREAMS)
@pytest.mark.parametrize("name", [*FILTERS, *REFUSED])
def test_a_filter_ends_the_text(name: str, plan: str, spoilt: Spoilt) -> None:
    """It was asked again, then the text was lost; the draft model went on past it."""
    generation, num_asked = spoilt("chat", plan, (FILTERS | REFUSED)[name])
    assert generation.finish_reason == "content_filter" and num_asked == 1
    own = generation.token_ids[:-1]
    assert generation.text == TARGET.vocab.decode(own) and ALONE[: len(own)] == own and bool(own) == (name in FILTERS)
    assert generation.token_ids[-1] in TARGET.vocab.end_ids and "edge-fallback" not in generation.origins


def test_a_filter_is_not_learned_from(spoilt: Spoilt) -> None:
    """No model chose the token that stands for its end."""
    lesson = lesson_of(spoilt("chat", "cloud", FILTERS["Zhipu: sensitive"])[0], "a", "b", "c")
    assert lesson is not None and lesson.marks[-1] == UNJUDGED and set(lesson.marks[:-1]) != {UNJUDGED}
