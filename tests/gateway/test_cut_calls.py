"""A call that was cut is none: an agent finds nothing to run, and all interfaces say the same, whole and streamed."""

import json

import pytest

from .interfaces import ARGUMENTS, ENDS, QUESTION, TEXT, WHOLE, Told, ask, body_of, forced
from .running import Running


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
        told, usage = ask(served, path, body), served.client.post(f"{served.v1}/{path}", json=body).json()["usage"]
        assert told.is_for_calls and len(told.calls) == 1 and isinstance(told.parts[-1], tuple)
        num_tokens = usage["completion_tokens" if path == "chat/completions" else "output_tokens"]
        assert num_tokens == text.index("}}") + 2
    told = ask(served, path, body_of(path, "auto", one=True) | forced("好。云"))
    assert told.text == "好。云" and not told.calls


@pytest.mark.parametrize("stops", [["zz", "天", "Paris"], ["arr", "Paris", "Par"], ["<", "ris"]])
def test_the_stop_sequence_that_matched_is_named(served: Running, stops: list[str]) -> None:
    text = "London, Paris, Rome"
    at = {stop: text.find(stop) for stop in stops if stop in text}
    first = min(at, key=lambda stop: (at[stop], len(stop)))
    body = {"model": "skydraft-lossless", "messages": QUESTION, "max_tokens": 99, "stop_sequences": stops}
    told = ask(served, "messages", body | forced(text))
    assert told == Told((text[: at[first]],), False, ("stop_sequence", first))
    assert ask(served, "messages", body | forced("Rome")).ending == ("end_turn", None)
