"""Calls of tools on the page: shown as calls, answered with results, and sent back as messages."""

import json
from typing import Any

import pytest

from .browsing import answered, expect, grave, is_too_wide, settled
from .fake_gateway import FakeGateway, finish, plain_reply, run

pytestmark = pytest.mark.browser
TOOL = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


def piece(text: str, origin: str, index: int, arguments: str, name: str = "") -> dict[str, Any]:
    function = {"arguments": arguments} | ({"name": name} if name else {})
    call = {"index": index, "function": function} | ({"id": f"call_{index}", "type": "function"} if name else {})
    chunk = run("", origin, 0)
    chunk["choices"][0]["delta"] = {"tool_calls": [call]}
    chunk["skydraft"]["text"] = text
    return chunk


def calling() -> list[Any]:
    return [
        run("Looking.", "edge", 0),
        piece('<tool_call>\n{"name": "get_weather", "arguments": {"ci', "skipped", 0, '{"ci', "get_weather"),
        piece('ty": "上海"}}', "accepted", 0, 'ty": "上海"}'),
        piece("\n</tool_call> …", "recovered", 1, "{}", "<b>time</b>"),
        finish("tool_calls"),
    ]


def test_a_call_is_shown_answered_and_sent_back(page: Any, fake: FakeGateway) -> None:
    fake.replies = [calling(), plain_reply("25 degrees.")]
    answered(page, "Weather?")
    expect(page.locator(".call h4")).to_have_text(["Calls get_weather", "Calls <b>time</b>"])
    assert page.locator(".call pre").first.text_content() == '{\n  "city": "上海"\n}'
    page.set_viewport_size({"width": 360, "height": 740})
    assert not is_too_wide(page)
    page.get_by_label("Result of get_weather").fill("晴，25度")
    page.get_by_label("Result of <b>time</b>").fill("12:00")
    page.get_by_role("button", name="Send results").click()
    settled(page, 2)
    calls = [
        {"id": "call_0", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "上海"}'}},
        {"id": "call_1", "type": "function", "function": {"name": "<b>time</b>", "arguments": "{}"}},
    ]
    assert fake.bodies[1]["messages"] == [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Looking.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_0", "content": "晴，25度"},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    expect(page.get_by_role("button", name="Send results")).to_have_count(0)  # to calls of earlier answers
    assert not grave(page)


def test_tools_and_a_schema_are_sent_and_what_is_no_json_is_said_and_left_out(page: Any, fake: FakeGateway) -> None:
    fake.replies = [plain_reply("a"), plain_reply("b")]
    page.locator("#open-settings").click()
    page.locator("#tools").fill(json.dumps([TOOL]))
    page.locator("#schema").fill('{"type": "obj')
    expect(page.locator("#schema-note")).to_be_visible()
    expect(page.locator("#tools-note")).to_be_hidden()
    page.locator("#close-settings").click()
    answered(page, "One")
    page.locator("#open-settings").click()
    page.locator("#tools").fill("{}")
    page.locator("#schema").fill('{"type": "object"}')
    expect(page.locator("#schema-note")).to_be_hidden()
    expect(page.locator("#tools-note")).to_be_visible()
    assert not grave(page)
    page.locator("#close-settings").click()
    answered(page, "Two", 2)
    first, second = fake.bodies
    assert first["tools"] == [{"type": "function", "function": TOOL}]
    assert "response_format" not in first and "tools" not in second
    assert second["response_format"]["json_schema"]["schema"] == {"type": "object"}
