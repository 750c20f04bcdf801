"""Thinking in the three interfaces: whole is streamed, tools and schemas come after it, and what clients ask for."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest

from skydraft.config import DecodingParams
from skydraft.errors import OptionError
from skydraft.gateway.pair import Pair
from skydraft.gateway.requests import Defaults

from ..gateway.interfaces import ALL_WHOLE, WHOLE, ask, call_text, events_of, plain, tool_of
from ..gateway.running import Running, gateway, written_by
from .scripts import LEVELLED, OPENED, SWITCHED, pair_of

SCRIPT = "<think>\nhm, 2?\n</think>\n\nIt is 4."
ASKED = [{"role": "user", "content": "快"}]
CALL = ("f", {"type": "object", "properties": {"a": {"const": "b"}}})  # a function and its parameters


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with gateway(Pair(*pair_of(SCRIPT))) as running:
        yield running


def said(path: str, body: dict[str, Any]) -> tuple[str, str]:
    """Thinking and text of a whole answer."""
    told = ALL_WHOLE[path](body)
    return told.thought, told.text


def num_prompt(answer: Any) -> int:
    """Tokens of a prompt that was answered."""
    used = answer["usage"]
    return int(used.get("prompt_tokens") or used["input_tokens"] + used.get("cache_read_input_tokens", 0))


@pytest.mark.parametrize("limit", [2, 6, 14, 15, 64])
@pytest.mark.parametrize("path", WHOLE)
def test_whole_is_streamed(served: Running, path: str, limit: int) -> None:
    body = plain(path, "快", limit)
    told = ask(served, path, body)
    assert "hm, 2?\n".startswith(told.thought) and "It is 4.".startswith(told.text)
    assert (limit < 64) or (told.thought, told.text) == ("hm, 2?", "It is 4.")
    name = "thinking" if path == "messages" else "reasoning"
    for stream in (False, True):
        assert f'{name}_tokens":{min(limit, 12)}' in served.post(path, **body, stream=stream).text


ORDER = {
    "responses": "created in_progress output_item.added content_part.added reasoning_text.delta reasoning_text.done "
    "content_part.done output_item.done output_item.added content_part.added output_text.delta output_text.done "
    "content_part.done output_item.done completed",
    "messages": "message_start content_block_start thinking_delta signature_delta content_block_stop "
    "content_block_start text_delta content_block_stop message_delta message_stop",
}


@pytest.mark.parametrize("path", ORDER)
def test_events_are_those_that_the_sdks_know(served: Running, path: str) -> None:
    told = events_of(served.post(path, **plain(path, "快", 64, stream=True)).text)
    kinds = [event["delta"]["type"] if event["type"] == "content_block_delta" else event["type"] for event in told]
    assert " ".join(kind.removeprefix("response.") for kind, _ in groupby(kinds)) == ORDER[path]
    if path == "responses":
        types = pytest.importorskip("openai.types.responses")
        adapter = pytest.importorskip("pydantic").TypeAdapter(types.ResponseStreamEvent)
        for event in told:
            adapter.validate_python(event, strict=False)


CALLING = call_text("f", {"a": "b"})
CALLED = ("f", '{"a": "b"}', True)


@pytest.mark.parametrize("path", WHOLE)
def test_calls_come_after_the_thinking_and_within_one_that_never_ends(path: str) -> None:
    """Models of Qwen's call so now and then, and agents stopped: nothing was said, and nothing was called."""
    body = plain(path, "快", 200, tools=[tool_of(path, *CALL)])
    for script, calls, text in (
        (f"<tool_call>?\n</think>\n\n{CALLING}", 1, ""), (f"{CALLING}\n</think>\n\nno", 0, "no"),
        (f"hm, <tool_call>?\n{CALLING}", 1, ""), (f"{CALLING}\n{CALLING}", 2, ""), ("<tool_call>?", 0, ""),
    ):  # fmt: skip
        with gateway(Pair(*pair_of(f"<think>\n{script}"))) as running:
            told = ask(running, path, body)
            assert (told.calls, told.text, told.is_for_calls) == ([CALLED] * calls, text, calls > 0)
            assert told.thought == script.partition("\n</think>")[0]


def test_what_a_grammar_rules_comes_after_the_thinking() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for script, more, part in (
        (CALLING, {"tools": [tool_of("chat/completions", *CALL)], "tool_choice": "required"}, CALLED),
        ('{"a": 1}', {"response_format": form}, '{"a": 1}'),
    ):  # fmt: skip
        with gateway(Pair(*pair_of(f"<think>\n<tool_call>?\n</think>\n\n{script}"))) as running:
            told = ask(running, "chat/completions", plain("chat/completions", "快", 200, **more))
            assert (told.thought, told.parts, told.is_for_calls) == ("<tool_call>?", (part,), part == CALLED)


NOTHING = "<think>\n\n</think>\n\nabc"
OFF: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}),
    ("chat/completions", {"reasoning_effort": "none"}), ("responses", {"reasoning": {"effort": "none"}}),
    ("messages", {"thinking": {"type": "disabled"}}), ("chat/completions", {"skydraft": {"think": "off"}}),
    ("chat/completions", {"enable_thinking": False}),
]  # fmt: skip


def test_thinking_is_turned_off_as_each_client_says_it() -> None:
    with gateway(Pair(*pair_of(NOTHING))) as running:
        for path, asked in OFF:
            answer, on = (running.post(path, **plain(path, "快", 64, **more)) for more in (asked, {}))
            assert answer.status_code == 200 and said(path, answer.json()) == ("", "abc"), answer.text
            assert num_prompt(answer.json()) - num_prompt(on.json()) == 6  # the tags that the template writes


def test_budgets_and_levels_reach_the_model_and_what_cannot_is_refused(served: Running) -> None:
    for path, asked in (
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 3}}),
        ("chat/completions", {"skydraft": {"think_budget": 3}}),
    ):  # fmt: skip
        assert ask(served, path, plain(path, "快", 64, **asked)).thought == "h", path
    with written_by("{{ reasoning_effort }}{% for m in messages %}{{ m.content }}{% endfor %}") as running:  # no tags
        low, high = (running.chat("快", reasoning_effort=level).json() for level in ("low", "high"))
        assert num_prompt(high) == num_prompt(low) + 1 and "left_out" not in low["skydraft"]
    with gateway(Pair(*pair_of("ab</think>c", LEVELLED))) as running:
        levels = {level: num_prompt(running.chat("快", reasoning_effort=level).json()) for level in ("low", "high")}
        assert levels["high"] == levels["low"] + 1
        for effort, thinking in (("high", {"type": "adaptive"}), ("low", {"type": "adaptive"}), ("low", None)):
            more = {"output_config": {"effort": effort}, "thinking": thinking}
            told = running.post("messages", **plain("messages", "快", 64, **more))
            assert num_prompt(told.json()) == levels[effort]
        told = running.chat("快", thinking={"type": "disabled"})
        assert told.status_code == 200 and told.json()["skydraft"]["left_out"] == ["thinking"]
        assert running.chat("快", reasoning_effort="ultra").status_code == 400
        asked = running.post("completions", **plain("completions", reasoning_effort="low"))
        assert asked.json()["skydraft"]["left_out"] == ["thinking"]
    with written_by("{{ reasoning_effort }}{% for m in messages %}{{ m.content }}{% endfor %}") as running:  # no tags
        low, high = (running.chat("快", reasoning_effort=level).json() for level in ("low", "high"))
        assert high["usage"]["prompt_tokens"] == low["usage"]["prompt_tokens"] + 1 and "left_out" not in low["skydraft"]


def test_a_model_that_does_not_think_refuses_what_is_meant_and_passes_over_what_agents_always_send() -> None:
    with gateway() as running:
        for asked in ({"chat_template_kwargs": {"enable_thinking": True}}, {"skydraft": {"think": "on"}}):
            answer = running.chat(**asked)
            assert answer.status_code == 400 and "think" in answer.json()["error"]["message"], asked
        for path, asked in (
            ("messages", {"thinking": {"type": "adaptive"}}), ("messages", {"thinking": {"type": "disabled"}}),
            ("responses", {"reasoning": {"effort": "medium", "summary": "auto"}}),
        ):  # fmt: skip
            answer = running.post(path, **plain(path, "快", 3, **asked))
            assert answer.status_code == 200, answer.text
        assert answer.json()["skydraft"]["left_out"] == ["thinking"]


def with_thought(thought: str) -> dict[str, list[Any]]:
    """Turns of each interface: an assistant that has thought and called a tool, and what it gave."""
    call, use = {"id": "1", "function": {"name": "f"}}, {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    lines = thought.split("\n")
    return {
        "chat/completions": [
            {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": thought},
            {"role": "tool", "tool_call_id": "1", "content": "高"}],
        "messages": [
            {"role": "assistant", "content": [*({"type": "thinking", "thinking": line} for line in lines), use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "高"}]}],
        "responses": [
            *({"type": "reasoning", "content": [{"type": "reasoning_text", "text": line}, {"type": "x", "text": "no"}]}
              for line in lines),
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "高"}],
    }  # fmt: skip


@pytest.mark.parametrize("path", WHOLE)
def test_what_was_thought_comes_back_to_the_template(path: str) -> None:
    """With the results of tools; what was thought before the last question is left out."""
    name = "input" if path == "responses" else "messages"
    bodies = [
        plain(path, "快", 64, tools=[tool_of(path, *CALL)], **{name: [*ASKED, *with_thought(thought)[path]]})
        for thought in ("a\nc", "")
    ]
    with gateway(Pair(*pair_of("b", "{# tools <tool_call> #}" + SWITCHED))) as running:
        much, none = (num_prompt(running.post(path, **body).json()) for body in bodies)
    assert much - none == len("a\nc") + 6  # and tags with their line breaks


def test_a_gateway_has_a_default() -> None:
    with gateway(Pair(*pair_of(NOTHING)), defaults=Defaults(DecodingParams(), think="off")) as running:
        off = num_prompt(running.chat("快", max_tokens=64).json())
        assert off - num_prompt(running.chat("快", max_tokens=64, reasoning_effort="high").json()) == 6
        # Of every request of Claude Code.
        adaptive = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}
        assert num_prompt(running.post("messages", **plain("messages", "快", 64, **adaptive)).json()) == off
    budget = Defaults(DecodingParams(think_budget=3))
    with gateway(Pair(*pair_of(SCRIPT)), defaults=budget) as running:
        answer = running.chat("快", model="skydraft-lossless", max_tokens=64).json()
        assert said("chat/completions", answer)[0] == "h"
        assert running.post("completions", model="skydraft", prompt="a").status_code == 200  # a text has no thinking
    opened = Pair(*pair_of("a</think>b", OPENED))
    for pair, cannot in ((None, budget), (None, Defaults(DecodingParams(), think="on")),
                         (opened, Defaults(DecodingParams(), think="off"))):  # fmt: skip
        with pytest.raises(OptionError, match="thinking"), gateway(pair, defaults=cannot):
            pass
