"""What holds of all interfaces of the gateway, whole and streamed.

What `/v1/messages` has for itself: stop sequences by name, beginnings of answers, the line for the maker's bill. What
others have for themselves has files of its own.
"""

import json
import re
from itertools import chain
from typing import Any

import pytest

from .interfaces import ALL_WHOLE, COUNTS, ENDS, WHOLE, Told, ask, events_of, forced, num_read, num_used, plain, tool_of
from .running import Running, written_by
from .test_openai_sdk import expected

QUESTION = "语速"
ATTACHED, RECORDING = "(an attachment, which cannot be read here)", "(a recording, which cannot be heard here)"
PARAMETERS: Any = {"type": "object", "properties": {"city": {"enum": ["上海", "北京"]}}, "required": ["city"]}
CHAT_TOOL, MESSAGES_TOOL, RESPONSES_TOOL = (
    tool_of(path, "天气", PARAMETERS, description="一城的天气")
    for path in ("chat/completions", "messages", "responses")
)
MARK = "x-anthropic-billing-header: cc_version=2.1.197.bcb; cc_entrypoint=cli; cch="


@pytest.mark.parametrize("path", ALL_WHOLE)
@pytest.mark.parametrize("mode", ["edge", "cloud", "lossless", "fluency", "quality", "answers"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_answer_is_that_of_the_python_interface(served: Running, path: str, mode: str, temperature: float) -> None:
    drawn: Any = {"temperature": temperature, "seed": 5}
    want = expected(mode, max_new_tokens=16, **drawn)
    body = plain(path, model=f"skydraft-{mode}", skydraft={"token_ids": True}, **drawn)
    answer, told = served.post(path, **body).json(), ask(served, path, body)
    assert (told.text, told.ending) == (want.text, ENDS[path]["length"])
    assert num_used(path, answer) == (want.num_prompt_tokens, 16)
    if path != "messages":  # Anthropic's clients refuse other fields
        ours = answer["skydraft"]
        assert (ours["token_ids"], ours["origins"]) == (list(want.token_ids), list(want.origins))


@pytest.mark.parametrize("path", ALL_WHOLE)
def test_an_unknown_model_is_an_error_in_the_shape_of_the_interface(served: Running, path: str) -> None:
    reply = served.post(path, **plain(path, model="gpt-9"))
    kind = "not_found_error" if path == "messages" else "invalid_request_error"
    assert reply.status_code == 404 and reply.json()["error"]["type"] == kind
    assert reply.json().get("type") == ("error" if path == "messages" else None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", WHOLE)
def test_a_prompt_that_is_too_long_is_told_in_the_words_of_each_client(
    served: Running, path: str, stream: bool
) -> None:
    answer = served.post(path, **plain(path, "语" * 5000, stream=stream))
    if path == "responses" and stream:  # Codex compacts only at this event
        *_, last = events_of(answer.text)
        assert answer.status_code == 200 and last["type"] == "response.failed"
        error = last["response"]["error"]
    else:
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error.get("code", "context_length_exceeded") == "context_length_exceeded"
    # As Claude Code looks for it.
    found = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", error["message"], re.I)
    assert found and int(found[1]) >= 4999 and int(found[2]) == 4096, error


# Parts of a result, by the words that they are read as.
PARTS: dict[str, list[dict[str, Any]]] = {
    ATTACHED: [{"type": "image", "source": {}}, {"type": "input_file"}, {"type": "search_result", "content": []}],
    RECORDING: [{"type": "input_audio", "input_audio": {"data": "AAAA"}}],
}  # fmt: skip
# What no model here reads.
SKIPPED = ["reasoning", "web_search_call", "mcp_call", "mcp_approval_response", "compaction", "what_comes_next"]
CONVERSATION: Any = {"tools": [CHAT_TOOL], "messages": [
    {"role": "system", "content": "慢"}, {"role": "user", "content": "语\n速"},
    {"role": "assistant", "content": [{"type": "thinking"}, {"type": "text", "text": "快"}], "tool_calls": [
        {"id": number, "function": {"name": "天气", "arguments": json.dumps({"city": city})}}
        for number, city in (("1", "上海"), ("2", "北京"))]},
    {"role": "tool", "tool_call_id": "1", "content": "晴"},
    {"role": "tool", "tool_call_id": "2", "content": "\n".join(words for words in PARTS for _ in PARTS[words])},
    {"role": "user", "content": "好"},
]}  # fmt: skip
# Requests of an interface, each with the chat that means the same.
SAME: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "items, calls and their results": (
        "responses", {"tools": [RESPONSES_TOOL], "input": [
            {"role": "developer", "content": "慢"},
            {"type": "message", "role": "user", "content": [
                {"type": "input_text", "text": "语"}, {"type": "input_text", "text": "速"}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
                {"type": "output_text", "text": "快", "annotations": []}, {"type": "refusal", "refusal": "不"}]},
            *({"type": kind, "arguments": {}, "output": [], "thinking": None} for kind in SKIPPED),
            {"type": "function_call", "call_id": "1", "name": "天气", "arguments": '{"city": "上海"}'},
            {"type": "function_call", "call_id": "2", "name": "天气", "arguments": {"city": "北京"}},
            {"type": "function_call_output", "call_id": "1", "output": "晴"},
            {"type": "function_call_output", "call_id": "2", "output": [*chain(*PARTS.values())]},
            {"type": "web_search_call"}, {"role": "user", "content": "好"},
        ]}, CONVERSATION,
    ),
    "a system prompt, blocks, calls and their results": (
        "messages", {"system": [{"type": "text", "text": "慢", "cache_control": {"type": "ephemeral"}}],
         "tools": [MESSAGES_TOOL | {"cache_control": {"type": "ephemeral"}}], "messages": [
            {"role": "user", "content": [{"type": "text", "text": "语"}, {"type": "text", "text": "速"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "?", "signature": ""}, {"type": "redacted_thinking", "data": ""},
                {"type": "server_tool_use", "id": "1", "input": {}}, {"type": "text", "text": "快"},
                {"type": "web_search_tool_result", "tool_use_id": "1", "content": [{"type": "web_search_result"}]},
                {"type": "tool_use", "id": "1", "name": "天气", "input": {"city": "上海"}},
                {"type": "tool_use", "id": "2", "name": "天气", "input": {"city": "北京"}}]},
            {"role": "user", "content": [
                {"type": "text", "text": "好"},
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "晴"}]},
                {"type": "tool_result", "tool_use_id": "2", "content": [*chain(*PARTS.values())]}]},
        ]}, CONVERSATION,
    ),
    "how tokens are chosen": (
        "responses",
        drawn := {"temperature": 0.9, "seed": 7, "top_k": 3, "stop": ["我"], "frequency_penalty": 0.5,
                  "logit_bias": {"5": -9}},
        {"messages": [{"role": "user", "content": QUESTION}], **drawn},
    ),
    "system messages after the user's": (
        "messages", {"system": "慢", "messages": [
            {"role": "user", "content": "快"}, {"role": "system", "content": [{"type": "text", "text": "低"}]},
            {"role": "assistant", "content": "高"}, {"role": "system", "content": "轻"},
            {"role": "user", "content": "重"}, {"role": "system", "content": "清"}]},
        {"messages": [
            {"role": "system", "content": "慢"}, {"role": "system", "content": "低"}, {"role": "user", "content": "快"},
            {"role": "assistant", "content": "高"}, {"role": "system", "content": "轻"},
            {"role": "system", "content": "清"}, {"role": "user", "content": "重"}]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_a_request_means_the_same_as_a_chat(served: Running, case: str) -> None:
    path, ours, chat = SAME[case]
    body = plain(path) | ours
    got, want = served.post(path, **body).json(), served.chat(model="skydraft-lossless", **chat).json()
    assert ALL_WHOLE[path](got).text == want["choices"][0]["message"]["content"]
    assert num_used(path, got)[0] == want["usage"]["prompt_tokens"] == num_read(served, path, body)


SEES: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"type": "image_url", "image_url": {"url": "x"}}, ATTACHED),
    ("chat/completions", {"type": "input_audio", "input_audio": {"data": "AAAA"}}, RECORDING),
    ("messages", {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}, ATTACHED),
    ("responses", {"type": "input_image", "image_url": "x"}, ATTACHED),
]


@pytest.mark.parametrize(("path", "part", "words"), SEES)
def test_what_cannot_be_read_is_words_before_the_last_turn(served: Running, path: str, part: Any, words: str) -> None:
    """There it is refused, also while its tools are being called."""
    name, says = "input" if path == "responses" else "messages", {"role": "assistant", "content": "慢"}
    asks, said, told = ({"role": "user", "content": content} for content in ("快", [part], words))

    def count(*turns: Any) -> Any:
        return served.post(COUNTS[path], **plain(path) | {name: turns}).json()

    assert count(said, says, asks)["input_tokens"] == count(told, says, asks)["input_tokens"]
    for turns in ((said,), (asks, says, said, says)):
        message = count(*turns)["error"]["message"]
        assert message.startswith(name) and "takes only text: no audio, pictures or files" in message


def test_the_first_event_holds_nothing_yet_and_the_last_what_was_used(served: Running) -> None:
    first, *_, delta, last = events_of(served.post("messages", **plain("messages", stream=True)).text)
    assert first["message"]["content"] == [] and first["message"]["usage"]["input_tokens"] == 2
    assert delta["usage"]["output_tokens"] == 16 and last == {"type": "message_stop"}


@pytest.mark.parametrize("stops", [["zz", "天", "Paris"], ["arr", "Paris", "Par"], ["<", "ris"]])
def test_the_stop_sequence_that_matched_is_named(served: Running, stops: list[str]) -> None:
    text = "London, Paris, Rome"
    at = {stop: text.find(stop) for stop in stops if stop in text}
    first = min(at, key=lambda stop: (at[stop], len(stop)))
    body = plain("messages", limit=99, stop_sequences=stops)
    told = ask(served, "messages", body | forced(text))
    assert told == Told((text[: at[first]],), False, ("stop_sequence", first))
    assert ask(served, "messages", body | forced("Rome")).ending == ("end_turn", None)


def test_an_answer_goes_on_from_a_last_message_of_the_assistant() -> None:
    ends = "{% for m in messages %}{{ m.content }}。{% for c in m.tool_calls or [] %}<tool_call>{{ tools }}{% endfor %}"
    with written_by(ends + "{% endfor %}") as running:

        def text(**body: Any) -> str:
            return ask(running, "messages", plain("messages") | body).text

        for begun in ("语速较", "语速 \n", "，"):
            turns: Any = [{"role": "user", "content": "快"}, {"role": "assistant", "content": begun}]
            body, path = plain("chat/completions") | {"messages": turns}, "chat/completions"
            goes_on, anew = (ask(running, path, body | {"continue_final_message": on}).text for on in (True, False))
            assert text(messages=turns) == goes_on != anew == text(messages=turns, continue_final_message=False)
        use = {"type": "tool_use", "id": "1", "name": "天气", "input": {}}
        assert text(messages=[turns[0], {"role": "assistant", "content": [use]}], tools=[tool_of("messages", "天气")])


def test_the_line_for_the_makers_bill_is_not_read_and_what_a_proxy_joined_to_it_is(served: Running) -> None:
    """It changes with each request, so a prompt that begins with it would be read from its first token again."""

    def count(*system: str, form: str = "blocks") -> int:
        texts: Any = "".join(system) if form == "text" else [{"type": "text", "text": text} for text in system]
        body = plain("messages") | ({} if form == "turn" else {"system": texts})
        if form == "turn":
            body["messages"] = [{"role": "system", "content": texts}, *body["messages"]]
        return num_read(served, "messages", body)

    want = count("be kind")
    assert count() < want < count("be kinder") and count(f"a\n{MARK}1;") > count("a\n")
    for form in ("blocks", "text", "turn"):
        for joined in ("{}\n", "{}\n\n", "{} ", "\n{}\n"):
            assert count(joined.format(f"{MARK}abcde;") + "be kind", form=form) == want, (form, joined)
        assert count(f"{MARK}012;", form=form) == count()
    assert count(f"{MARK}abcde;", "be kind") == count(f"{MARK}012;\n", "be kind", form="turn") == want
