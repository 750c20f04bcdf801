"""Many clients at once: who hangs up, floods or waits disturbs nobody, and leaves nothing behind.

Coding agents: what they sent is answered, too long a prompt is told as they understand it, and waiting is shown.
"""

import json
import os
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import skydraft
from skydraft.engines.base import Engine
from skydraft.engines.toy import character_vocab, open_toy
from skydraft.gateway.pair import Pair

from ..choosing.test_stopping import follower
from ..serving import serving, waiting
from .interfaces import ask, call_text, events_of, plain
from .running import Running, client, gateway, over, scripted_pair, toy_pair
from .test_openai_sdk import expected

CHAT = "chat/completions"
RECORDED = sorted((Path(__file__).parent / "agents").glob("*.json"))
TELLS = {"/v1/messages": '"thinking":"hm', "/v1/responses": '"reasoning_text"',
         "/v1/chat/completions": '"reasoning_content":"hm'}  # fmt: skip


def assert_all_is_free(running: Running) -> None:
    """Each sequence of the engines, and each seat, can be had again: those that are lost would fail a choice."""
    answers = [running.chat(n=8, model=f"skydraft-{mode}", seed=3) for mode in ("lossless", "cloud", "edge")]
    assert [answer.status_code for answer in answers] == [200] * 3, answers[0].text


def slow(engine: Engine, seconds: float) -> Any:
    return waiting(engine, lambda: time.sleep(seconds))


def hang_up(running: Running, after_s: float, given: dict[str, Any]) -> None:
    """Send a request and close the connection without a word."""
    with client(running.port, json.dumps(given).encode()):
        time.sleep(after_s)


def filled(value: Any) -> Any:
    """A recorded body with its long texts, which are made up."""
    if isinstance(value, dict):
        return "lorem ipsum " * (value["$text"] // 12) if "$text" in value else {k: filled(v) for k, v in value.items()}
    return [filled(each) for each in value] if isinstance(value, list) else value


def recorded(path: Path) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = json.loads(path.read_text())
    for each in asked:
        same = {name: asked[0]["body"][name] for name in each["body"] if each["body"][name] == {"$same": name}}
        each["body"] = filled(each["body"] | same)
        each["headers"] = each["headers"] or asked[0]["headers"]
    return asked


class Held:
    """A pair whose draft model stops within its first prompt, until it may go on, or fails then."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.pair, self.goes_on, self.is_there = toy_pair(), threading.Event(), threading.Event()
        forward = self.pair.edge.forward

        def held(feeds: Any, *, want_logits: bool) -> Any:
            rows = forward(feeds, want_logits=want_logits)
            if feeds[0][0].length >= 512:
                self.is_there.set()
                assert self.goes_on.wait(30)
                if fault:
                    raise fault
            return rows

        self.pair.edge.forward = held  # type: ignore[method-assign]


def test_200_clients_that_hang_up_leave_nothing_behind() -> None:
    pair = toy_pair()
    slow(pair.edge, 0.001)
    rng = random.Random(4)
    with gateway(pair, max_running=4, max_waiting=300) as running:
        assert_all_is_free(running)
        before = len(os.listdir("/proc/self/fd")), threading.active_count()
        with ThreadPoolExecutor(40) as pool:
            for _ in range(200):
                model = f"skydraft-{rng.choice(['quality', 'lossless', 'cloud', 'edge'])}"
                given = plain(CHAT, limit=3000, model=model, stream=rng.random() < 0.6, n=rng.choice([1, 1, 2, 8]))
                pool.submit(hang_up, running, rng.random() * 0.6, given)
        running.wait_until_idle()
        assert_all_is_free(running)
        assert len(os.listdir("/proc/self/fd")) <= before[0] + 2 and threading.active_count() <= before[1] + 2


@pytest.mark.parametrize("where", ["here", "served"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_lossless_is_that_of_the_command_line_in_company_and_as_a_third_turn(where: str, temperature: float) -> None:
    options = {"temperature": temperature, "seed": 9}
    with (
        serving(open_toy("toy", 4096, 12), max_sessions=12) as server,
        over(skydraft.connect(server.address), max_running=5)
        if where == "served"
        else gateway(max_running=5) as running,
        ThreadPoolExecutor(4) as pool,
    ):
        floods = [pool.submit(running.chat, "快" * (1 + n % 4), max_tokens=40, seed=n) for n in range(24)]
        talk: list[dict[str, str]] = []
        for question in ("语速" * 300, "情绪", "音调"):
            talk.append({"role": "user", "content": question})
            want = expected("lossless", talk, max_new_tokens=24, **options)
            got = running.chat(talk, skydraft={"token_ids": True, "k": 5}, max_tokens=24, **options).json()
            assert got["skydraft"]["token_ids"] == list(want.token_ids)
            talk.append({"role": "assistant", "content": want.text})
        assert {flood.result().status_code for flood in floods} == {200}


def test_when_the_cloud_is_gone_all_go_on_but_the_cloud_alone_which_says_so(unhurried: None) -> None:
    with serving(open_toy("toy", 4096, 4)) as server, over(skydraft.connect(server.address, timeout_s=1.0)) as running:
        assert running.client.get(f"{running.url}/health").json() == {"status": "ok", "cloud": "up"}
        server.stop()
        running.wait_until(lambda: running.client.get(f"{running.url}/health").json()["cloud"] == "down")
        gated = {"model": "skydraft", "skydraft": {"gate": "entropy:1.0"}}  # names no mode: the gate is the choice
        for body in ({}, gated, gated | {"model": "skydraft-quality"}):
            gone = running.chat(**body, max_tokens=40)
            assert gone.status_code == 200 and "edge-fallback" in gone.json()["skydraft"]["origins"]
        reply = running.chat(model="skydraft-cloud")
        assert reply.status_code == 503 and reply.headers["retry-after"]
        assert reply.json()["error"]["type"] == "server_error"
        assert running.chat(model="skydraft-edge").status_code == 200


def test_a_loop_is_left_in_texts_too_unless_the_client_says_so() -> None:
    with gateway(Pair(follower("员在", character_vocab("今天天气很好员在")))) as running:
        asked = {"model": "skydraft-edge", "prompt": "今", "max_tokens": 40}
        both = ({"break_loops": False}, {})
        loops, leaves = (running.post("completions", **asked, skydraft=ours).json() for ours in both)
        assert "员在" * 15 in loops["choices"][0]["text"] and "员在" * 15 not in leaves["choices"][0]["text"]


@pytest.mark.parametrize("hold_s", [0.02, 0.05, 0.1])
def test_no_text_is_lost_when_the_first_token_comes_as_the_stream_begins(hold_s: float) -> None:
    pair = toy_pair()
    slow(pair.edge, 0.05)
    with gateway(pair, hold_s=hold_s, ping_s=0.01) as running:
        for _ in range(4):
            ask(running, CHAT, plain(CHAT, limit=3, model="skydraft-edge"))


def test_more_choices_than_there_is_room_for_are_no_matter_of_waiting() -> None:
    with gateway(max_running=1, max_waiting=1) as running:
        reply = running.chat(n=3)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "n"
        assert running.chat(n=2).status_code == 200


def test_line_separators_cut_no_event(served: Running) -> None:
    body = {"model": "skydraft", "prompt": "a\u2028b\u0085c\u2029d", "echo": True, "stream": True, "max_tokens": 2}
    text = served.client.post(f"{served.v1}/completions", json=body).content.decode()
    events = [line for line in text.splitlines() if line.startswith("data: {")]  # cuts at all of these
    assert json.loads(events[0][6:])["choices"][0]["text"] == "a\u2028b\u0085c\u2029d"


def test_the_metrics_are_those_of_what_happened() -> None:
    with gateway() as running:
        ours = running.chat(max_tokens=20, skydraft={"k": 5}).json()["skydraft"]
        running.chat(model="nope")
        running.chat(temperature=9)
        running.wait_until_idle()
        reply = running.client.get(f"{running.url}/metrics")
        values = {name: float(value) for name, value in re.findall(r"(?m)^([^#].*) (.+)$", reply.text)}
    for origin in set(ours["origins"]):
        assert values[f'skydraft_gateway_tokens_total{{origin="{origin}"}}'] == ours["origins"].count(origin)
    assert values["skydraft_gateway_answers_total"] == values["skydraft_gateway_ttft_seconds_count"] == 1
    assert values['skydraft_gateway_refusals_total{status="404"}'] == 1
    assert values['skydraft_gateway_refusals_total{status="400"}'] == 1
    assert values["skydraft_gateway_running"] == values["skydraft_gateway_waiting"] == 0
    rounds = sum(value for name, value in values.items() if name.startswith("skydraft_gateway_rounds_total"))
    assert rounds == ours["stats"]["num_rounds"]


@pytest.mark.parametrize("thought", ["", "hm, <tool_call>?"], ids=["plain", "thinking"])
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_what_agents_sent_is_answered(path: Path, thought: str) -> None:
    """The first request and one with the results of tools, as they came, and whole where a stream was wanted."""
    asked = recorded(path)
    tools = asked[0]["body"].get("tools") or []
    name = next((tool.get("name") or tool["function"]["name"] for tool in tools), "")
    steps = [call_text(name, {"a": "é"}), "done"] if name else ["done"]
    with gateway(scripted_pair(steps, 400_000, thought)) as served:
        for number, each in enumerate(asked):
            for stream in (True, False):
                answer = served.client.post(
                    served.url + each["path"], headers=each["headers"], json=each["body"] | {"stream": stream}
                )
                assert answer.status_code == 200, answer.text
                wanted = (f'"name":"{name}"', "é") if name and not number else ("done",)
                assert all(word in answer.text for word in wanted), answer.text[-2000:]
                is_thought = TELLS[each["path"].partition("?")[0]] in answer.text and "<tool_call>?" in answer.text
                assert is_thought == bool(thought) and "</think>" not in answer.text, answer.text[-2000:]


@pytest.mark.parametrize("has_keys", [False, True])
def test_health_says_how_far_prompts_are_read_and_nothing_of_those_of_other_keys(has_keys: bool) -> None:
    held = Held()
    with gateway(held.pair, authorize=(lambda _: "me") if has_keys else None) as served:
        asking = threading.Thread(target=served.chat, args=("语" * 1300,), kwargs={"model": "skydraft-edge"})
        asking.start()
        assert held.is_there.wait(30)
        state = served.client.get(f"{served.url}/health").json()
        held.goes_on.set()
        asking.join()
        assert state.get("reading") == (None if has_keys else {"tokens": 512, "of": 1299})
        assert "reading" not in served.client.get(f"{served.url}/health").json()


PINGS = {
    "chat/completions": ": ping", "completions": ": ping", "messages": 'event: ping\ndata: {"type":"ping"}',
    "responses": "event: response.in_progress",
}  # fmt: skip


@pytest.mark.parametrize("path", PINGS)
@pytest.mark.parametrize("fault", [None, RuntimeError("/secret/path")], ids=["answered", "failed"])
def test_a_client_that_waits_gets_signs_of_life_and_then_the_answer_or_an_error(
    path: str, fault: Exception | None
) -> None:
    held = Held(fault)
    body = plain(path, "语" * 600, 4, model="skydraft-edge", stream=True)
    with gateway(held.pair, hold_s=0.05, ping_s=0.05) as served:
        threading.Timer(0.6, held.goes_on.set).start()
        text = served.post(path, **body).text
    assert text.count(PINGS[path]) >= 3 and "secret" not in text
    *_, last = (event for event in events_of(text) if event.get("type") != "ping")
    error = last.get("response", last).get("error")
    assert bool(error) == (fault is not None) and (not error or "its log says why" in error["message"])
    if error and path in ("responses", "messages"):
        told = {"responses": ("response.failed", "server_error"), "messages": ("error", None)}[path]
        assert (last["type"], error.get("code")) == told
