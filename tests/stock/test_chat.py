"""Any chat of OpenAI's kind is a target that streams, and the draft model goes on where it breaks off.

Streams of OpenAI's kind as hosts send them, by public reports: ours reads the same text from them, with as many
requests. And how a text ends that a server does not end well: what was written is kept.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.edge.stock.chat import Chat
from skydraft.edge.stock.ids import LlamaServer, Sglang, Vllm
from skydraft.edge.stock.refusals import refusal
from skydraft.engines.toy import open_toy
from skydraft.errors import BrokenOff, CloudFailure, LimitExceeded, RateLimited, SkydraftError
from skydraft.lab.learning.collect import lesson_of
from skydraft.lab.learning.lessons import UNJUDGED
from tests.gateway.interfaces import QUESTION, WHOLE, body_of
from tests.gateway.running import over
from tests.hostile import texts
from tests.hostile.texts import ALONE, DRAFT, LENGTH, STREAMS, TARGET, TEXT, assert_all_is_accounted_for, committed
from tests.prompts.test_chat_template import TEMPLATES
from tests.stock import faults
from tests.stock.conftest import Spoilt, said
from tests.stock.fakes import HOSTS, Fake, fake
from tests.stock.faults import Fault, choices
from tests.thinking.scripts import OPENED, pair_of

NUM = 3  # events with text in each answer


@contextmanager
def chat(host: str = "openai", token_s: float = 0.0, **how: Any) -> Iterator[tuple[Fake, Any]]:
    with fake(host, TARGET, token_s=token_s) as server, closing(skydraft.connect(server.url, **how)) as cloud:
        yield server, cloud


def write(cloud: Any, mode: str = "lossless", edge: Any = DRAFT, **given: Any) -> Generation:
    params = DecodingParams(**{"max_new_tokens": LENGTH} | given)
    return skydraft.generate(TEXT, edge=edge, cloud=cloud, plan=make_plan(mode), params=params, break_loops=False)


def assert_goes_on(done: Generation, num_written: int) -> None:
    """The first tokens are the server's, and the draft model has chosen all others after exactly these."""
    assert list(done.origins) == ["cloud"] * num_written + ["edge-fallback"] * (len(done.token_ids) - num_written)
    assert done.token_ids[num_written:] == tuple(texts.choices(DRAFT, done.token_ids)[num_written:])
    assert len(done.token_ids) == LENGTH and "\ufffd" not in done.text


def delta(change: Callable[[Any], Any]) -> Fault:
    return choices(lambda choice: choice | {"delta": change(choice["delta"])} if "delta" in choice else choice)


def before(*lines: bytes) -> Fault:
    return faults.retells(lambda event: b"".join(lines) + event)


def event(**said: Any) -> bytes:
    return b"data: " + json.dumps({"id": "", "object": "", "created": 0, "model": ""} | said).encode() + b"\n\n"


def end(finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {}, "text": "", "token_ids": [], "finish_reason": finish}
    return event(choices=[choice], **more)


def refused(status: int, **error: Any) -> Fault:
    return faults.refuses(status, json.dumps({"error": error}))


@pytest.mark.parametrize("host", HOSTS)
def test_a_text_is_the_chats_own(host: str) -> None:
    with chat(host) as (server, cloud):
        write(cloud).run()
        for number, mode in enumerate(("cloud", "lossless"), len(server.generating) + 1):
            done = write(cloud, mode).run()
            assert cloud.kind == "chat" and len(server.generating) == number
            assert (done.token_ids, done.finish_reason, set(done.origins)) == (ALONE, "length", {"cloud"})
            assert server.model.asked[-1].body["messages"] == [{"role": "user", "content": TEXT}]


def test_a_device_without_a_model_streams() -> None:
    with chat() as (_, cloud):
        done = write(cloud, edge=skydraft.without_model(TARGET)).run()
        assert (done.token_ids, set(done.origins), done.request.plan.drafts) == (ALONE, {"cloud"}, False)


def test_a_chat_gets_the_messages_as_the_draft_models_template_reads_them() -> None:
    """A template without a system role has the system prompt in front of the user's words; so has the chat."""
    edge = open_toy("toy", 4096, 1)
    edge.vocab.chat_template = TEMPLATES["gemma"]
    with chat() as (server, cloud):
        skydraft.generate("我", system="你", edge=edge, cloud=cloud, params=DecodingParams(max_new_tokens=2)).run()
        assert server.model.asked[-1].body["messages"] == [{"role": "user", "content": "你\n\n我"}]


def test_a_new_model_is_asked_again_without_what_it_does_not_take() -> None:
    with chat("openai, new") as (server, cloud):
        assert [write(cloud, "cloud").run().token_ids for _ in range(2)] == [ALONE] * 2
        fields = [{"max_tokens", "temperature"} & asked.body.keys() for asked in server.generating]
        assert fields == [{"max_tokens", "temperature"}, {"temperature"}, set(), set()]
        with pytest.raises(CloudFailure, match=r"answered 400: .* 'temperature' does not support"):
            write(cloud, "cloud", temperature=0.7).run()


def test_where_our_template_has_begun_to_think_the_answer_is_none_of_that() -> None:
    draft, _ = pair_of("hm</think>no", OPENED)
    with fake("openai") as server, closing(skydraft.connect(server.url)) as cloud:
        server.faults.append(faults.tells(*said("4 is", " it"), {"choices": [{"delta": {}, "finish_reason": "stop"}]}))
        done = write(cloud, edge=draft).run()
    assert (done.text, done.reasoning, done.finish_reason) == ("4 is it", "", "eos")


@pytest.mark.parametrize(
    "parts", [["语😀", "速\ud83d", "\ude00"], ["语", "速😀今", "天"], "😀", ["\ud83d", "\ude00语"]], ids=str
)
def test_no_character_is_lost_doubled_or_cut_where_it_breaks_off(parts: Sequence[str]) -> None:
    """Each emoji is four tokens of ours, and two halves for a server that counts in UTF-16."""
    whole = "".join(parts).encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    with chat() as (server, cloud):
        server.faults.append(faults.tells(*said(*parts), done=False))
        done = write(cloud).run()
    num_written = done.origins.count("cloud")
    assert TARGET.vocab.decode(done.token_ids[:num_written]) == whole
    assert_goes_on(done, num_written)


def test_a_chat_that_is_killed_is_not_asked_again_when_it_is_back() -> None:
    lines: list[str] = []
    with chat(token_s=0.05, notify=lines.append) as (server, cloud):
        generation = write(cloud)
        tokens = iter(generation)
        for _ in range(LENGTH // 4):
            next(tokens)
        server.kill()
        while generation.origins[-1] == "cloud":
            next(tokens)
        server.start()
        num_before = len(server.generating)
        for _ in tokens:
            time.sleep(0.03)  # the server would be looked for now and then
        assert_goes_on(generation, generation.origins.count("cloud"))
        assert len(server.generating) == num_before and len(lines) == 1 and "ended within its answer" in lines[0]


@pytest.mark.parametrize(("mode", "require"), [("cloud", False), ("lossless", True)])
def test_a_text_that_may_not_go_on_alone_ends_with_what_it_has(mode: str, require: bool) -> None:
    with chat(require=require, timeout_s=5) as (server, cloud):
        server.faults.append(faults.cut(20))
        generation = write(cloud, mode)
        with pytest.raises(BrokenOff, match=r"ended within its answer, .* cannot go on: the connection broke"):
            generation.run()
    assert len(written := committed(generation)) > 0 and written == ALONE[: len(written)]
    assert len(server.generating) == 1


def test_a_text_that_has_ended_here_is_not_written_on_there() -> None:
    with chat(token_s=0.002) as (server, cloud):
        done = write(cloud, stop=(TARGET.vocab.decode(ALONE[4:6]),)).run()
        server.wait_until_idle()
    assert done.finish_reason == "stop_string" and server.model.num_written < LENGTH


CALLED = [
    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "get_weather", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": "x"},
]
SAYS = "A chat server takes only messages: no tools, no raw prompts, no partial answers. Mode edge takes all."


def test_what_a_chat_server_has_no_place_for_is_refused_at_once_in_one_line() -> None:
    """In each interface, whole and streamed; a name has a place."""
    with fake("openai") as server, over(skydraft.connect(server.url, api="chat", model="toy")) as served:
        asked = [body_of(path, choice) | {"path": path} for path in WHOLE for choice in ("auto", "required")]
        talk = {"path": "chat/completions", "model": "skydraft-lossless", "max_tokens": 8}
        open_end = [*QUESTION, {"role": "assistant", "content": "a"}]
        asked += [talk | {"messages": open_end, "continue_final_message": True}, talk | {"messages": QUESTION + CALLED}]
        begun = {"continue_ids": [1], "continue_as_prompt": True}  # the server's own answer would begin anew
        asked += [talk | {"messages": QUESTION, "skydraft": begun}, talk | {"path": "completions", "prompt": "a"}]
        for body, stream, mode in itertools.product(asked, (False, True), ("lossless", "cloud")):
            answer = served.post(**body | {"stream": stream, "model": f"skydraft-{mode}"})
            assert answer.status_code == 400 and answer.json()["error"]["message"].endswith(SAYS), answer.text
        assert "语速" not in str(server.model.asked)
        ids = [each["id"] for each in served.client.get(f"{served.v1}/models").json()["data"]]
        assert ids == ["skydraft", *(f"skydraft-{mode}" for mode in ("edge", "cloud", "lossless"))]
        named = [{**QUESTION[0], "name": "ann"}]
        assert served.post(**talk | {"messages": named, "model": "skydraft-cloud"}).status_code == 200
    assert server.model.asked[-1].body["messages"] == named


ANYWHERE: dict[str, Fault] = {
    "Azure: filter results without a choice": before(event(choices=[], prompt_filter_results=[])),
    "choices: null": before(event(choices=None, usage={"prompt_tokens": 1})),
    "a null for a choice": before(event(choices=[None])),
    "no error": faults.retells_json(lambda event: event | {"error": None}),
    "a blank reason": choices(lambda choice: choice | {"finish_reason": choice["finish_reason"] or " "}),
    "a reason each time": choices(lambda choice: choice | {"finish_reason": "stop"}),
    "an unknown end": choices(lambda choice: choice | {"finish_reason": choice["finish_reason"] and "eos_token"}),
    "comments": before(b": OPENROUTER PROCESSING\n\n", b":\n", b"data: : OPENROUTER PROCESSING\n\n"),
    "empty data": before(b"data:\n\n", b"data: \n\n", b"data: null\n\n"),
    "other fields": before(b"id: 7\n", b"retry: 1000\n", b'event: own.progress\ndata: {"tool": "search"}\n\n'),
    "no blank after the colon": faults.retells(lambda event: event.replace(b"data: ", b"data:")),
    "CRLF": faults.retells(lambda event: event.replace(b"\n", b"\r\n")),
    "neither [DONE] nor a last line's end": faults.retells(
        lambda event: b"" if b"[DONE]" in event else event.rstrip() if b'"usage": {' in event else event
    ),
    "a byte order mark": before(b"\xef\xbb\xbf"),
}
CHATS: dict[str, Fault] = {
    "Azure: a choice without text": before(event(choices=[{"index": 0, "finish_reason": None}], usage=None)),
    "delta: null at the end": delta(lambda said: said if said.get("content") else None),
    "no reasoning": delta(lambda said: said | {"content": said.get("content") or None, "reasoning": ""}),
    "content in parts": delta(lambda said: said | {"content": [{"type": "text", "text": said.get("content", "")}]}),
    "a message for a delta": choices(lambda choice: {"message": choice["delta"]} | choice | {"delta": None}),
    "a refusal": delta(lambda said: said | {"content": None, "refusal": said.get("content")}),
}


@pytest.mark.parametrize(("name", "api"), [
    *((name, "chat") for name in ANYWHERE | CHATS), *((name, "vllm") for name in ANYWHERE),
])  # fmt: skip
def test_a_stream_that_broke_others_is_read(name: str, api: str, spoilt: Spoilt) -> None:
    (_, num_sound), (generation, num_asked) = spoilt(api, "cloud"), spoilt(api, "cloud", (ANYWHERE | CHATS)[name])
    assert generation.token_ids == ALONE and num_asked <= num_sound


SAID, END = said(*"语速快"), {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
THOUGHTS: list[Any] = [{"content": None, "reasoning_content": "hm"}, {"reasoning": "so I think"}]
ENDED_WELL: dict[str, tuple[str, Fault]] = {
    "an error after the end": ("语速快", faults.tells(*SAID, END, {"error": "too late"})),
    "no [DONE]": ("语速快", faults.tells(*SAID, END, done=False)),
    "noise after the end": ("语速快", faults.tells(*SAID, END, "[done]")),
    "halves of characters that stay alone": ("语\ufffd!", faults.tells(*said("语\ud83d", "!", "\ud83d"), END)),
    "thoughts": ("语速快", faults.tells(*({"choices": [{"delta": each}]} for each in THOUGHTS), *SAID, END)),
}


@pytest.mark.parametrize("plan", STREAMS)
@pytest.mark.parametrize("name", ENDED_WELL)
def test_a_text_that_has_ended_is_whole_and_its_thoughts_are_paid(name: str, plan: str, spoilt: Spoilt) -> None:
    text, fault = ENDED_WELL[name]
    generation, num_asked = spoilt("chat", plan, fault)
    assert (generation.text, generation.finish_reason, num_asked) == (text, "eos", 1) and not generation.reasoning
    assert generation.stats.tokens_out >= len(SAID) + len(THOUGHTS) * (name == "thoughts")


ENDS: dict[str, Fault] = {
    "an end without a reason": faults.bursts(NUM, b"data: [DONE]\n\n"),
    "OpenRouter: 502": faults.bursts(NUM, b'data: {"choices": [], "error": {"code": 502, "message": "full"}}\n\n'),
    "llama-server: the field error": faults.bursts(NUM, b'error: {"code": 500, "message": "x"}\n\ndata: [DONE]\n\n'),
    "an error without a field": faults.bursts(NUM, b'{"error": {"code": 500, "message": "x"}}'),
    "a page": faults.bursts(NUM, b"data: <html>\n\n"),
    "network_error": faults.bursts(NUM, end("network_error") + b"data: [DONE]\n\n"),
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


FILTERS: dict[str, Fault] = {
    "in an event of its own": faults.bursts(NUM, end("content_filter") + b"data: [DONE]\n\n"),
    "Gemini: with the reason": faults.bursts(NUM, end("content_filter: SAFETY")),
    "Gemini's own": faults.bursts(NUM, end("PROHIBITED_CONTENT")),
    "DashScope: an error": faults.bursts(NUM, end(error={"code": "data_inspection_failed", "message": "no."})),
}
REFUSED: dict[str, Fault] = {
    "Azure": refused(400, code="content_filter", message="The response was filtered.", type=None, param="prompt"),
    "DeepSeek": refused(400, type="invalid_request_error", message="Content Exists Risk"),
    "at once": faults.tells({"id": "", "choices": [{"index": 0, "delta": {}, "finish_reason": "content_filter"}]}),
}


@pytest.mark.parametrize("plan", STREAMS)
@pytest.mark.parametrize("name", [*FILTERS, *REFUSED])
def test_a_filter_ends_the_text(name: str, plan: str, spoilt: Spoilt) -> None:
    """It was asked again, then the text was lost; the draft model went on past it. No model chose its end."""
    generation, num_asked = spoilt("chat", plan, (FILTERS | REFUSED)[name])
    assert generation.finish_reason == "content_filter" and num_asked == 1
    own = generation.token_ids[:-1]
    assert generation.text == TARGET.vocab.decode(own) and ALONE[: len(own)] == own and bool(own) == (name in FILTERS)
    assert generation.token_ids[-1] in TARGET.vocab.end_ids and "edge-fallback" not in generation.origins
    lesson = lesson_of(generation, "a", "b", "c")
    assert lesson is None or (lesson.marks[-1] == UNJUDGED and UNJUDGED not in lesson.marks[:-1])


@pytest.mark.parametrize("kind", [Vllm(), Sglang(), LlamaServer(), Chat()])
@pytest.mark.parametrize(("event", "error", "says"), [
    ({"error": {"message": "no\nway", "code": 429}}, RateLimited, "The server answered 429: no way"),
    ({"error": {"message": "no", "code": "server_error"}}, CloudFailure, "an error in place of an answer: no"),
    ({"error": "no"}, CloudFailure, "an error in place of an answer: no"),
    ({"error": {"code": 400, "message": "exceeds the available context size"}}, LimitExceeded, "context size"),
    ({"error": {"code": [], "message": {}}}, CloudFailure, "The server sent an error in place of an answer."),
])  # fmt: skip
def test_an_error_within_a_stream_says_what_it_is(kind: Any, event: Any, error: type[SkydraftError], says: str) -> None:
    with pytest.raises(error, match=says) as told:
        kind.written(event)
    assert type(told.value) is error and "\n" not in str(told.value)


@pytest.mark.parametrize(("text", "seconds"), [("7", 7), ("", 1), ("soon", 1), ("-3", 1), ("9" * 400, 3600)])
def test_a_server_says_when_to_ask_again(text: str, seconds: float) -> None:
    error = refusal(429, {"retry-after": text}, b"")
    assert isinstance(error, RateLimited) and error.retry_after_s == seconds


def test_who_cannot_wait_so_long_hears_for_how_long(spoilt: Spoilt) -> None:
    with pytest.raises(RateLimited, match="answered 429") as raised:
        spoilt("vllm", "cloud", faults.refuses(429, Retry_After="3000"))
    assert raised.value.retry_after_s == 3000
