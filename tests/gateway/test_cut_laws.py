"""Over every cut of a text: arguments are JSON where their call is given as finished, and nowhere else.

Without models: the law is of what was written, and not of how.
"""

import itertools
import json
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from skydraft.decoding.accounts.receipt import Sent, receipt_of
from skydraft.decoding.accounts.stats import stats_of
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.toy import open_toy
from skydraft.gateway.desk import Began, Ended, Event, Wrote
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
    body_of,
    events_of,
    is_object,
    plain,
)

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


def told_of(path: str, body: dict[str, Any], pieces: Seq[str], finish: FinishReason) -> Told:
    """What a client has of them, which is the same whole and streamed."""
    answer: Any = KINDS[path]
    ask: Ask = answer.reads.model_validate(body).to_ask()
    whole, streamed = (answer(Order(ask, [GenerateRequest(asked("a"))]), VOCAB) for _ in range(2))
    events = list(written(ask, pieces, finish))
    for event in events:
        list(whole.take(0, event))
    chunks = [*streamed.first(), *(chunk for event in events for chunk in streamed.take(0, event)), *streamed.last()]
    told = ALL_WHOLE[path](json.loads(json.dumps(whole.whole())))
    assert told == STREAM[path](events_of(b"".join(map(streamed.as_event, chunks)).decode()))
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


@pytest.mark.parametrize("path", ALL_WHOLE)
@pytest.mark.parametrize(("finish", "end"), [("content_filter", "filter"), ("length", "length")])
def test_a_text_that_a_filter_or_the_length_ended_says_so(path: str, finish: FinishReason, end: str) -> None:
    told = told_of(path, plain(path), pieces_of("语速", 2), finish)
    assert (told.text, told.ending, told.is_for_calls) == ("语速", ENDS[path][end], False)
