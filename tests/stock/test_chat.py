"""Any chat of OpenAI's kind is a target that streams, and the draft model goes on where it breaks off."""

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.errors import BrokenOff, CloudFailure
from tests.gateway.interfaces import QUESTION, WHOLE, body_of
from tests.gateway.running import over
from tests.hostile.texts import ALONE, DRAFT, LENGTH, TARGET, TEXT, choices, committed
from tests.stock import faults
from tests.stock.conftest import said
from tests.stock.fakes import HOSTS, Fake, fake
from tests.thinking.scripts import OPENED, pair_of


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
    assert done.token_ids[num_written:] == tuple(choices(DRAFT, done.token_ids)[num_written:])
    assert len(done.token_ids) == LENGTH and "\ufffd" not in done.text


@pytest.mark.parametrize("host", HOSTS)
def test_a_text_is_the_chats_own(host: str) -> None:
    with chat(host) as (server, cloud):
        write(cloud).run()
        for number, mode in enumerate(("cloud", "lossless"), len(server.generating) + 1):
            done = write(cloud, mode).run()
            assert cloud.kind == "chat" and len(server.generating) == number
            assert (done.token_ids, done.finish_reason, set(done.origins)) == (ALONE, "length", {"cloud"})
            assert server.model.asked[-1].body["messages"] == [{"role": "user", "content": TEXT}]


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
