"""Any chat of OpenAI's kind is a target that streams, and the draft model goes on where it breaks off."""

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.errors import BrokenOff, CloudFailure, OptionError
from tests.gateway.interfaces import QUESTION, WHOLE, body_of
from tests.gateway.running import over
from tests.hostile.texts import ALONE, DRAFT, LENGTH, TARGET, TEXT, choices, committed
from tests.stock import faults
from tests.stock.fakes import GENERATING, HOSTS, Fake, fake
from tests.thinking.scripts import OPENED, pair_of


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest) -> Iterator[Fake]:
    with fake(request.param, TARGET) as server:
        yield server


def write(cloud: Any, mode: str = "lossless", **given: Any) -> Generation:
    params = DecodingParams(**{"max_new_tokens": LENGTH} | given)
    plan = make_plan(mode)
    return skydraft.generate(TEXT, edge=DRAFT, cloud=cloud, plan=plan, params=params, break_loops=False)


def assert_goes_on(done: Generation, num_written: int) -> None:
    """The first tokens are the server's, and the draft model has chosen all others after exactly these."""
    assert list(done.origins) == ["cloud"] * num_written + ["edge-fallback"] * (len(done.token_ids) - num_written)
    assert done.token_ids[num_written:] == tuple(choices(DRAFT, done.token_ids)[num_written:])
    assert len(done.token_ids) == LENGTH and "\ufffd" not in done.text


@pytest.mark.parametrize("mode", ["cloud", "lossless"])
def test_a_text_is_the_chats_own(host: Fake, mode: str) -> None:
    with closing(skydraft.connect(host.url)) as cloud:
        write(cloud).run()
        num_before, done = len(host.generating), write(cloud, mode).run()
    assert cloud.kind == "chat" and len(host.generating) == num_before + 1
    assert (done.token_ids, done.finish_reason, set(done.origins)) == (ALONE, "length", {"cloud"})
    body = host.model.asked[-1].body
    assert body["messages"] == [{"role": "user", "content": TEXT}] and done.stats.tokens_out >= LENGTH


def test_a_new_model_is_asked_again_without_what_it_does_not_take() -> None:
    with fake("openai, new", TARGET) as server, closing(skydraft.connect(server.url)) as cloud:
        for _ in range(2):
            assert write(cloud, "cloud").run().token_ids == ALONE
        bodies = [asked.body for asked in server.model.asked if asked.path in GENERATING]
        assert ["max_tokens" in body for body in bodies] == [True, False, False, False]
        assert ["temperature" in body for body in bodies] == [True, True, False, False]
        with pytest.raises(CloudFailure, match=r"answered 400: .* 'temperature' does not support"):
            write(cloud, "cloud", temperature=0.7).run()


def test_what_a_model_thinks_is_no_part_of_its_answer_and_is_paid() -> None:
    deltas = [{"content": None, "reasoning_content": "hm"}, {"reasoning": "so I think"}, {"content": "语速"}]
    events = [{"choices": [{"index": 0, "delta": each}]} for each in deltas]
    with fake("openai", TARGET) as server, closing(skydraft.connect(server.url)) as cloud:
        server.faults.append(faults.tells(*events, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
        done = write(cloud).run()
    assert (done.text, done.reasoning, done.finish_reason) == ("语速", "", "eos") and done.stats.tokens_out >= 3


def test_where_our_template_has_begun_to_think_the_answer_is_none_of_that() -> None:
    draft, _ = pair_of("hm</think>no", OPENED)
    events = [{"choices": [{"index": 0, "delta": {"content": each}}]} for each in ("4 is", " it")]
    with fake("openai") as server, closing(skydraft.connect(server.url)) as cloud:
        server.faults.append(faults.tells(*events, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
        plan, params = make_plan("lossless"), DecodingParams(max_new_tokens=LENGTH)
        done = skydraft.generate(TEXT, edge=draft, cloud=cloud, plan=plan, params=params).run()
    assert (done.text, done.reasoning, done.finish_reason) == ("4 is it", "", "eos")


@pytest.mark.parametrize("num_parts", [5, 20])
def test_a_text_that_breaks_off_is_gone_on_with(host: Fake, num_parts: int) -> None:
    lines: list[str] = []
    with closing(skydraft.connect(host.url, notify=lines.append)) as cloud:
        write(cloud).run()
        num_before = len(host.generating)
        host.faults.append(faults.cut(num_parts))
        done = write(cloud).run()
    num_written = done.origins.count("cloud")
    assert_goes_on(done, num_written)
    assert done.token_ids[:num_written] == ALONE[:num_written] and len(host.generating) == num_before + 1
    assert num_parts - 5 < num_written <= num_parts and len(lines) == 1 and "ended within its answer" in lines[0]


@pytest.mark.parametrize("said", [["语😀", "速\ud83d", "\ude00"], ["语", "速😀今", "天"], "😀", ["\ud83d", "\ude00语"]])
def test_no_character_is_lost_doubled_or_cut_where_it_breaks_off(said: Sequence[str]) -> None:
    """Each emoji is four tokens of ours, and two halves for a server that counts in UTF-16."""
    events = [{"choices": [{"index": 0, "delta": {"content": each}}]} for each in said]
    whole = "".join(said).encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    with fake("openai", TARGET) as server, closing(skydraft.connect(server.url)) as cloud:
        server.faults.append(faults.tells(*events, done=False))
        done = write(cloud).run()
    num_written = done.origins.count("cloud")
    assert TARGET.vocab.decode(done.token_ids[:num_written]) == whole
    assert_goes_on(done, num_written)


def test_a_chat_that_is_killed_is_not_asked_again_when_it_is_back() -> None:
    with fake("openai", TARGET, token_s=0.05) as server, closing(skydraft.connect(server.url)) as cloud:
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
        assert len(server.generating) == num_before


@pytest.mark.parametrize(("mode", "require"), [("cloud", False), ("lossless", True)])
def test_a_text_that_may_not_go_on_alone_ends_with_what_it_has(host: Fake, mode: str, require: bool) -> None:
    with closing(skydraft.connect(host.url, require=require, timeout_s=5)) as cloud:
        write(cloud).run()
        num_before = len(host.generating)
        host.faults.append(faults.cut(20))
        generation = write(cloud, mode)
        with pytest.raises(BrokenOff, match=r"ended within its answer, .* cannot go on: the connection broke"):
            generation.run()
    assert len(written := committed(generation)) > 0 and written == ALONE[: len(written)]
    assert len(host.generating) == num_before + 1


GATED = [{"mode": "auto"}, {"mode": "answers"}, {"gate": "entropy:2"}, {"mode": "quality"}]


@pytest.mark.parametrize("given", GATED, ids=str)
@pytest.mark.parametrize("api", ["auto", "chat"])
def test_a_draft_cannot_be_checked_by_a_chat(given: dict[str, Any], api: str) -> None:
    with fake("openai", TARGET) as server, closing(skydraft.connect(server.url, api=api, model="toy")) as cloud:
        with pytest.raises(OptionError, match="needs skydraft serve, vLLM, SGLang or llama-server") as refused:
            skydraft.generate(TEXT, edge=DRAFT, cloud=cloud, plan=make_plan(**given)).run()
        assert "\n" not in refused.value.line and not server.generating


def test_a_text_that_has_ended_here_is_not_written_on_there() -> None:
    with fake("openai", TARGET, token_s=0.002) as server, closing(skydraft.connect(server.url)) as cloud:
        end = TARGET.vocab.decode(ALONE[4:6])
        done = write(cloud, stop=(end,)).run()
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
        asked += [talk | {"messages": open_end, "continue_final_message": True}]
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
