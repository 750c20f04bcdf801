"""What only servers without skydraft can do wrong: with text in place of ids, in the handshake, to other texts, and as
servers that were not meant. All else is in `tests/hostile`, with the same promises."""

import itertools
import threading
import time
from contextlib import closing, suppress
from typing import Any

import pytest

import skydraft
from skydraft.errors import CloudLost, SkydraftError
from tests.gateway.running import over
from tests.hostile.storms import ONCE
from tests.hostile.texts import (
    ALONE,
    DRAFT,
    LENGTH,
    STREAMS,
    TARGET,
    assert_all_is_accounted_for,
    assert_one_clear_line,
    failure_of,
    write,
)  # fmt: skip
from tests.stock import faults
from tests.stock.fakes import GENERATING, Fake, fake
from tests.stock.faults import Fault
from tests.thinking.scripts import thinking_toy


def storm(server: Fake, fault: Fault, after: int) -> None:
    left = [None] * after
    server.fault_of = lambda path: (left.pop() if left else fault) if path in GENERATING else None


# --- Text in place of ids


OF_CHATS = [
    "failing", "another key", "bytes of something else", "null", "a list", "endless nonsense", "a gzip bomb",
    "silent about this text", "silent after three answers", "cut after three answers", "cut within a token",
    "cut before the answer", "hung up on",
]  # fmt: skip


@pytest.mark.parametrize("plan", STREAMS)
@pytest.mark.parametrize("name", OF_CHATS)
def test_a_chat_that_fails_costs_no_token(name: str, plan: str) -> None:
    with fake("openai", TARGET) as server, closing(skydraft.connect(server.url, timeout_s=0.7)) as cloud:
        assert write(cloud, "cloud", raw=False).run().token_ids == ALONE
        storm(server, ONCE[name][1], after=0)
        generation = write(cloud, plan, raw=False)
        failed = failure_of(generation, plan) is not None
        assert failed == (plan == "cloud" or name == "another key") != ("edge-fallback" in generation.origins)


# --- The handshake

MODELS = {
    "no models": b"[]", "models that are no list": b"7", "a model without a name": b'[{"owned_by": "vllm"}]',
    "models of a host, which checks no draft": b'[{"id": "toy"}]',
    "a model named by a list": b'[{"id": [], "owned_by": "vllm"}]',
    "two models": b'[{"id": "a", "owned_by": "vllm"}, {"id": "b", "owned_by": "vllm"}]',
}  # fmt: skip
GREETINGS: dict[str, tuple[str, Fault]] = {
    **{name: ("/v1/models", faults.says(b'{"data": %s}' % data, "application/json")) for name, data in MODELS.items()},
    "a page": ("/v1/models", faults.says(b"<html>")),
    "an escape sequence": ("/v1/models", faults.says(b'{"data": [{"owned_by": "\\u001b[2J\\n"}]}')),
    "503": ("/v1/models", faults.refuses(503)),
    "404": ("/v1/models", faults.refuses(404)),
    "401": ("/v1/models", faults.refuses(401)),
    "a redirect": ("/v1/models", faults.redirects("https://example.com/v1/models")),
    "gigabytes": ("/v1/models", faults.floods(b" " * 65536, "application/json")),
    "a gzip bomb": ("/v1/models", faults.gzip_bomb(1 << 28)),
    "silence": ("/v1/models", faults.silent()),
    "other ids": ("/tokenize", faults.says(b'{"tokens": [1, 2, 3]}', "application/json")),
    "ids that are words": ("/tokenize", faults.says(b'{"tokens": ["a"]}', "application/json")),
    "no tokenizer": ("/tokenize", faults.says(b'{"tokens": null}', "application/json")),
}  # fmt: skip


@pytest.mark.parametrize("plan", ["gated", "cloud"])
@pytest.mark.parametrize("name", GREETINGS)
def test_a_server_that_cannot_be_met_is_one_clear_line(name: str, plan: str) -> None:
    where, fault = GREETINGS[name]
    with fake("vllm", TARGET) as server, closing(skydraft.connect(f"{server.url}/v1", timeout_s=0.7)) as cloud:
        server.fault_of = lambda path: fault if path == where else None
        try:
            generation = write(cloud, plan).run()
        except SkydraftError as error:
            assert_one_clear_line(error)
        else:  # it is there, and may become well
            assert plan == "gated" and name == "a model named by a list"
            assert not set(generation.origins) & {"accepted", "recovered", "bonus", "cloud"}


@pytest.mark.parametrize(("page", "told"), [
    (b"<!DOCTYPE HTML>\n<title>\nNot\nFound </title><p>Error code: 404</p>", "a web page (Not Found)"),
    (b"<html><body>It works!</body></html>", "a web page"),
    (b'\xef\xbb\xbf<?xml version="1.0"?>\n<!DOCTYPE html><title lang="en">A &amp; B</title>', "a web page (A & B)"),
    (b"<html><title>" + b" " * 60_000, "a web page"),  # its end is not looked for again from each blank
])  # fmt: skip
def test_a_web_server_is_told_by_the_title_of_its_page_alone(page: bytes, told: str) -> None:
    with fake("vllm", TARGET) as server, closing(skydraft.connect(f"{server.url}/v1", timeout_s=0.7)) as cloud:
        server.fault_of = lambda path: faults.says(page, status=404)
        began = time.process_time()
        with pytest.raises(SkydraftError, match="answered 404") as raised:
            write(cloud, "cloud").run()
        assert time.process_time() - began < 2.0
    assert f"404: {told}, not the answer of a model server." in raised.value.message
    assert "code" not in raised.value.message


LOADING = faults.refuses(503, '{"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}')


ALREADY = [(), ("/v1/models",), ("/v1/models", "/props", "/health")]  # what it answers before it has loaded its model


@pytest.mark.parametrize(("api", "already"), [*itertools.product(["llama-server", "vllm"], ALREADY)])
def test_a_server_that_loads_its_model_was_never_there_and_is_waited_for(api: str, already: tuple[str, ...]) -> None:
    lines: list[str] = []
    with fake(api, TARGET) as server, closing(skydraft.connect(server.url, notify=lines.append)) as cloud:

        def loading(path: str) -> Fault | None:
            return None if path in already else LOADING

        server.fault_of = loading
        ready = threading.Timer(0.5, setattr, (server, "fault_of", lambda path: None))
        ready.start()
        cloud.facts(0.2)  # as somebody may have asked before
        assert "edge-fallback" not in write(cloud, "gated").run().origins
        assert len(lines) == 1 and "is not ready; waiting up to 30 s. The server answered 503: Loading" in lines[0]

        server.fault_of = loading
        impatient = skydraft.connect(server.url, timeout_s=0.3)
        alone = skydraft.connect(server.url, timeout_s=0.3, fallback="start")
        with closing(impatient), closing(alone):
            for _ in range(2):
                impatient.facts(0.2)
                with pytest.raises(CloudLost, match=r"is not ready .*Loading model.*wait longer with timeout_s"):
                    write(impatient, "gated")
            assert set(write(alone, "gated").run().origins) == {"edge-fallback"}


def test_one_that_is_started_again_as_it_loads_is_waited_for_too() -> None:
    with fake("vllm", TARGET) as server, closing(skydraft.connect(server.url)) as cloud:
        server.fault_of = lambda path: LOADING
        threading.Timer(0.3, server.kill).start()

        def ready() -> None:
            server.fault_of = lambda path: None
            server.start()

        threading.Timer(0.8, ready).start()
        assert "edge-fallback" not in write(cloud, "gated").run().origins


@pytest.mark.parametrize("api", ["vllm", "llama-server"])
def test_a_server_on_this_machine_that_is_busy_for_a_moment_is_not_gone(api: str) -> None:
    with fake(api, TARGET) as server, closing(skydraft.connect(server.url)) as cloud:
        assert write(cloud, "gated").run().token_ids
        server.fault_of = lambda path: faults.slow(1.2)
        assert "edge-fallback" not in write(cloud, "gated", length=2).run().origins


@pytest.mark.parametrize("said", [0, -5, 1.5, "3", None, True])
def test_tokens_that_sglang_does_not_count_are_no_text(said: object) -> None:
    """Each of its events may tell all tokens again: the count says which are new, and they came twice."""

    def uncounted(event: Any) -> Any:
        return event | {"meta_info": event["meta_info"] | {"completion_tokens": said}}

    with fake("sglang", TARGET) as server, closing(skydraft.connect(server.url, timeout_s=2)) as cloud:
        sound = write(cloud, "gated").run()
        server.fault_of = lambda path: faults.retells_json(uncounted) if path in GENERATING else None
        generation = write(cloud, "gated").run()
        assert_all_is_accounted_for(generation)
        assert "edge-fallback" in generation.origins and "edge-fallback" not in sound.origins


IDLE = {
    "comments": ("vllm", b": keep-alive\n\n"),
    "no tokens": ("vllm", b'data: {"choices": [{"index": 0, "token_ids": []}]}\n\n'),
    "empty deltas": ("openai", b'data: {"choices": [{"index": 0, "delta": {}}]}\n\n'),
    "an end, many times": ("openai", b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'),
}


@pytest.mark.parametrize(("name", "plan"), [(name, "cloud") for name in IDLE] + [("no tokens", "gated")])
def test_events_without_tokens_hold_a_text_no_longer_than_its_time(name: str, plan: str) -> None:
    """The whole text: after that time a gated one goes on alone to its end, though the server answers others."""
    kind, part = IDLE[name]
    with fake(kind, TARGET) as server, closing(skydraft.connect(server.url, timeout_s=1)) as cloud:
        write(cloud, plan, raw=kind != "openai").run()
        storm(server, faults.floods(part, every_s=0.1), after=0)
        generation, began = write(cloud, plan, raw=kind != "openai"), time.monotonic()
        with suppress(SkydraftError):
            for _ in generation.rounds():
                time.sleep(0.1 * (plan == "gated"))
        assert time.monotonic() - began < 1.5 + 0.1 * len(generation.rounds_so_far)


def test_a_chat_that_gives_a_reason_with_each_slow_token_is_read_to_its_end() -> None:
    with fake("openai", TARGET, token_s=0.1) as server, closing(skydraft.connect(server.url, model="toy")) as cloud:
        stop = {"finish_reason": "stop"}
        ends = lambda event: event | {"choices": [each | stop for each in event["choices"]]}  # noqa: E731
        storm(server, faults.retells_json(ends), after=0)
        assert write(cloud, "cloud", raw=False, length=12).run().token_ids == ALONE[:12]


# --- Texts of one process share a server: what fails for one of them costs the others nothing


@pytest.mark.parametrize("dialect", ["vllm", "llama-server", "sglang"])
@pytest.mark.parametrize("asks", ["a text that lost its server", "facts"])
def test_what_fails_for_one_text_breaks_no_stream_of_another(dialect: str, asks: str, unhurried: None) -> None:
    """A busy server leaves a sign of life unanswered: the other text reads on, in its one request."""
    with fake(dialect, TARGET, token_s=0.05) as server, closing(skydraft.connect(server.url, timeout_s=2)) as cloud:
        assert cloud.facts(None) is not None
        texts, hung_up = list[Any](), list[str]()
        stream = threading.Thread(target=lambda: texts.append(write(cloud, "cloud").run()))
        begun = len(server.model.asked)
        stream.start()
        server.wait_until(lambda: any(asked.num_written > 2 for asked in server.model.asked[begun:]))

        def hangs_up(path: str) -> faults.Fault:
            hung_up.append(path)
            return faults.hangs_up()

        server.fault_of = hangs_up
        if asks == "facts":
            cloud.servers.facts.clear()
            with pytest.raises(skydraft.SkydraftError):
                cloud.facts(None)
        else:
            assert len(write(cloud, "gated").run().token_ids) == LENGTH
            Fake.wait_until(lambda: sum(path not in GENERATING for path in hung_up) > 1 or not stream.is_alive())
        stream.join(20)
    assert texts and texts[0].token_ids == ALONE and texts[0].receipt.calls == 1


# --- A server that comes up after its gateway and is not the one that was meant: the log says so, not the answers


UNMEANT: dict[str, tuple[Any, dict[str, str], str]] = {
    "no http": (DRAFT, {}, "does not speak skydraft's protocol"),
    "another model": (DRAFT, {"model": "other"}, "has no model other"),
    "another tokenizer": (thinking_toy(), {}, "as other tokens"),
}


@pytest.mark.parametrize("case", UNMEANT)
def test_what_the_operator_must_mend_is_in_the_log_not_the_answer(case: str, caplog: pytest.LogCaptureFixture) -> None:
    draft, options, says = UNMEANT[case]
    with fake("vllm", TARGET) as server:
        address = server.url.split("/")[2] if case == "no http" else server.url
        cloud = skydraft.connect(address, fallback="start", timeout_s=3, **options)
        with over(cloud, draft) as running:
            for mode in ("quality", "lossless"):
                caplog.clear()
                answer = running.chat(model=f"skydraft-{mode}")
                assert answer.status_code == 500 and says not in answer.text
                assert [each.levelname for each in caplog.records if says in each.getMessage()] == ["ERROR"]
            health = running.client.get(f"{running.url}/health")
            assert health.json() == {"status": "ok", "cloud": "down" if case == "no http" else "up"}
