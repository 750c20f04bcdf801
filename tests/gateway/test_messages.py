"""What `/v1/messages` has for itself: stop sequences by name, beginnings of answers, the line for the maker's bill."""

from typing import Any

import pytest

from .interfaces import Told, ask, events_of, forced, num_read, plain, tool_of
from .running import Running, written_by

MARK = "x-anthropic-billing-header: cc_version=2.1.197.bcb; cc_entrypoint=cli; cch="


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
