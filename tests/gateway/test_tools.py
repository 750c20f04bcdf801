"""Tools that may be called or are left out; a call that was cut is none, whole and streamed, on all interfaces."""

import itertools
import json
import sys
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest

from skydraft.decoding.accounts.receipt import Sent, receipt_of
from skydraft.decoding.accounts.stats import stats_of
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.toy import ToyEngine, character_vocab, open_toy
from skydraft.gateway.desk import Began, Ended, Event, Wrote
from skydraft.gateway.pair import Pair
from skydraft.gateway.requests import Order
from skydraft.gateway.schema import Ask
from skydraft.prompts.messages import asked
from skydraft.types import DraftBlock, FinishReason, LinkCost, Round, StepRecord, Token

from .interfaces import (
    ALL_WHOLE,
    ARGUMENTS,
    ENDS,
    KINDS,
    STREAM,
    TEXT,
    WHOLE,
    Told,
    ask,
    body_of,
    events_of,
    forced,
    is_object,
    num_read,
    num_used,
    plain,
    tool_of,
)
from .running import Running, gateway

pytest.importorskip("llguidance")
# Tools that are no functions.
OTHERS: dict[str, list[dict[str, Any]]] = {
    "responses": [
        {"type": "web_search", "external_web_access": True}, {"type": "what_comes_next"}, {"type": "local_shell"},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "a"}},
        {"type": "mcp", "server_label": "x", "server_url": "https://x.example"},
    ],
    "chat/completions": [{"type": "custom", "custom": {}}],
    "messages": [{"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"}],
}  # fmt: skip


@pytest.mark.parametrize("path", WHOLE)
def test_tools_that_are_not_functions_are_left_out_and_said(served: Running, path: str) -> None:
    others, function = OTHERS[path], tool_of(path)

    def count(*tools: dict[str, Any]) -> int:
        return num_read(served, path, plain(path, tools=tools))

    assert count(*others, function) == count(function) and count(*others) == count()
    told = json.dumps(sorted(tool["type"] for tool in others), separators=(",", ":"))
    for stream in (False, True):
        answer = served.post(path, **plain(path, tools=[*others, function], stream=stream))
        assert answer.status_code == 200 and (path == "messages" or f'"left_out":{told}' in answer.text), answer.text
    assert "left_out" not in served.post(path, **plain(path, tools=[function])).text


@pytest.mark.parametrize("path", WHOLE)
@pytest.mark.parametrize("stop", ["</tool_call>", "}\n<"])
def test_a_call_that_ends_with_the_stop_string_is_whole(served: Running, path: str, stop: str) -> None:
    for choice in ("required", "named"):
        told = ask(served, path, body_of(path, choice, stop=[stop], one=True))
        assert told == Told((("get_weather", ARGUMENTS, True),), True, ENDS[path]["calls"])
    options = body_of(path, "auto", stop=[stop.replace("}\n<", "\n<")], one=True) | forced(TEXT)
    assert ask(served, path, options) == Told((("get_weather", ARGUMENTS, True),), True, ENDS[path]["calls"])


@pytest.mark.parametrize("path", WHOLE)
def test_where_one_call_is_allowed_the_text_ends_with_it(served: Running, path: str) -> None:
    for text in (f"好。\n{TEXT}\n{TEXT}\n云", json.dumps({"name": "get_weather", "arguments": {}}) * 2):
        body = body_of(path, "auto", one=True) | forced(text)
        told, used = ask(served, path, body), num_used(path, served.post(path, **body).json())
        assert told.is_for_calls and len(told.calls) == 1 and isinstance(told.parts[-1], tuple)
        assert used[1] == text.index("}}") + 2
    told = ask(served, path, body_of(path, "auto", one=True) | forced("好。云"))
    assert told.text == "好。云" and not told.calls


VOCAB = open_toy("toy", 512, 1).vocab


HARD = '{"a": "}\\n</tool_call>", "b\\\\": {"c": "\\"}"}, "d": [{}]}'
FIRST, SECOND, THIRD = (TEXT.replace(ARGUMENTS, given) for given in (ARGUMENTS, HARD, "{}"))
TEXTS = {
    "required": ["\n".join((FIRST, SECOND, THIRD)), SECOND],
    "named": [FIRST, SECOND],
    "auto": [f"好。\n{FIRST}\n{SECOND}\n晴。\n{THIRD}云", SECOND, f"{FIRST}\n\n好"],
}
CASES = [(choice, text) for choice, texts in TEXTS.items() for text in texts]


def pieces_of(text: str, length: int) -> list[str]:
    """The first characters of a text, as tokens of one or of several."""
    sizes = itertools.accumulate(itertools.cycle((5, 1, 9, 3) if length % 5 else (1,)))
    ends = [*itertools.takewhile(lambda end: end < length, sizes), length]
    return [text[start:end] for start, end in itertools.pairwise([0, *ends])]


def written(ask: Ask, pieces: Seq[str], finish: FinishReason) -> Iterator[Event]:
    reader, record = ask.reader(), StepRecord(0, 0, 0, 0, 1, "written", "", 1.0, 1.0)
    yield Began(3, "")
    for number, piece in enumerate(pieces):
        if not reader.is_done:
            token = Token(number, "cloud" if number % 3 else "recovered", piece, 0)
            done = Round(record, DraftBlock(0, ()), (number,), (token.origin,))
            yield Wrote(done, [token], [reader.push(piece)], "")
    ended: FinishReason = "interrupted" if reader.is_done else finish
    yield Ended(ended, reader.finish(), "?", stats_of([record]), receipt_of(Sent(), (), (), LinkCost()))


def both(path: str, body: dict[str, Any], pieces: Seq[str], finish: FinishReason) -> tuple[Told, Told]:
    """What a client has of them, whole and streamed."""
    answer: Any = KINDS[path]
    ask: Ask = answer.reads.model_validate(body).to_ask()
    whole, streamed = (answer(Order(ask, [GenerateRequest(asked("a"))]), VOCAB) for _ in range(2))
    events = list(written(ask, pieces, finish))
    for event in events:
        list(whole.take(0, event))
    chunks = [*streamed.first(), *(chunk for event in events for chunk in streamed.take(0, event)), *streamed.last()]
    text = b"".join(map(streamed.as_event, chunks)).decode()
    return ALL_WHOLE[path](json.loads(json.dumps(whole.whole()))), STREAM[path](events_of(text))


def told_of(*given: Any) -> Told:
    told, streamed = both(*given)
    assert told == streamed
    return told


def calls_in(text: str, length: int) -> list[tuple[str, bool]]:
    """The arguments that the first characters of a text have, call by call, and whether they are whole."""
    found, at = [], 0
    while (mark := text.find('"arguments": ', at)) >= 0 and (begin := mark + len('"arguments": ')) < length:
        at = begin + json.JSONDecoder().raw_decode(text[begin:])[1]
        found.append((text[begin : min(at, length)], at <= length))
    return found


@pytest.mark.parametrize("path", WHOLE)
@pytest.mark.parametrize(("case", "one"), [*((each, False) for each in range(len(CASES))), (0, True), (4, True)])
def test_a_call_is_given_as_finished_where_its_arguments_are_whole(path: str, case: int, one: bool) -> None:
    choice, text = CASES[case]
    body, single = body_of(path, choice, {"type": "object"}, one=one), one or choice == "named"
    for length in range(len(text) + 1):
        finish: FinishReason = "length" if length % 3 else "stop_string"
        told = told_of(path, body, pieces_of(text, length), finish)
        want = calls_in(text, length)[: 1 if single else None]
        is_cut = bool(want) and not want[-1][1]
        if choice == "auto":  # a call is read with the bracket after its arguments
            want = [each for each in calls_in(text, length - 1)[: 1 if single else None] if each[1]]
        elif path == "messages":
            want = [each for each in want if each[1]]
        assert [(as_read(arguments), whole) for _, arguments, whole in told.calls] == [
            (as_read(arguments), whole) for arguments, whole in want
        ]
        assert all(is_object(arguments) == whole for _, arguments, whole in told.calls)
        ends_with_it = bool(want) and (single or finish == "stop_string")
        assert told.is_for_calls == (ends_with_it and (choice == "auto" or not is_cut))
        assert choice == "auto" or not told.text


def as_read(arguments: str) -> str:
    return json.dumps(json.loads(arguments)) if is_object(arguments) else arguments


@pytest.mark.parametrize("number", ["1e999", "-1e999"])
def test_a_number_in_a_call_that_no_double_holds_is_the_largest(number: str) -> None:
    said = TEXT.replace(ARGUMENTS, f'{{"x": {number}}}')
    told, _ = both("messages", body_of("messages", schema={"type": "object"}), [said], "eos")
    assert [abs(json.loads(arguments)["x"]) for _, arguments, _ in told.calls] == [sys.float_info.max]


@pytest.mark.parametrize("path", ALL_WHOLE)
@pytest.mark.parametrize(("finish", "end"), [("content_filter", "filter"), ("length", "length")])
def test_a_text_that_a_filter_or_the_length_ended_says_so(path: str, finish: FinishReason, end: str) -> None:
    told = told_of(path, plain(path), pieces_of("语速", 2), finish)
    assert (told.text, told.ending, told.is_for_calls) == ("语速", ENDS[path][end], False)


def unsure_engine() -> ToyEngine:
    """A model that calls in 6 of 10 cases when it is told of tools, and says how the weather is otherwise."""
    call = json.dumps({"name": "weather", "arguments": {"city": "上海", "days": 1}}, ensure_ascii=False)
    vocab = character_vocab(("?", "!", call, "晴，25 度"))
    vocab.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ '?' if tools else '!' }}{# <tool_call> #}"
    )
    asked, plain, called, said = range(4)
    by_last = np.zeros((vocab.size, vocab.size), np.float32)
    for before, after in ((plain, said), (called, vocab.size - 1), (said, vocab.size - 1)):
        by_last[before, after] = 100
    by_last[asked] = -100
    by_last[asked, [called, said]] = np.log([0.6, 0.4])
    engine = ToyEngine(vocab, by_last, name="unsure")
    engine.max_sequences = 4
    return engine


@pytest.fixture(scope="module")
def unsure() -> Iterator[Running]:
    with gateway(Pair(unsure_engine(), unsure_engine())) as running:
        yield running


@pytest.mark.parametrize("mode", ["edge", "quality", "lossless", "cloud"])
@pytest.mark.parametrize(("body", "calls"), [
    ({}, False), ({"tool_choice": "auto"}, False), ({"skydraft": {"min_call_prob": 0.7}}, False),
    ({"skydraft": {"min_call_prob": 0.5}}, True), ({"skydraft": {"min_call_prob": 0}}, True),
    ({"tools": []}, False),
])  # fmt: skip
def test_an_unlikely_call_is_an_answer_in_words(unsure: Running, mode: str, body: Any, calls: bool) -> None:
    tools = [tool_of("chat/completions", "weather", {"properties": {"city": {}, "days": {}}})]
    answer = unsure.chat("天气", **{"model": f"skydraft-{mode}", "tools": tools} | body)
    message = answer.json()["choices"][0]["message"]
    assert bool(message.get("tool_calls")) == calls and (calls or message["content"] == "晴，25 度")
