"""What only servers without skydraft can do wrong: in the handshake, to other texts, and with huge answers. All
else is in `tests/hostile`, with the same promises."""

import resource
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest

import skydraft
from skydraft.errors import CloudLost, OptionError, SkydraftError
from tests.hostile.texts import ALONE, DRAFT, LENGTH, TARGET, assert_one_clear_line, failure_of, write  # fmt: skip
from tests.stock import faults
from tests.stock.conftest import said
from tests.stock.fakes import GENERATING, fake
from tests.stock.faults import Fault, choices

# --- The handshake

MODELS = {
    "no models": b"[]", "models that are no list": b"7", "a model without a name": b'[{"owned_by": "vllm"}]',
    "models of a host, which checks no draft": b'[{"id": "toy"}]',
    "a model named by a list": b'[{"id": [], "owned_by": "vllm"}]',
    "two models": b'[{"id": "a", "owned_by": "vllm"}, {"id": "b", "owned_by": "vllm"}]',
}  # fmt: skip
TOKENS = {"ids that are words": b'["a"]', "no tokenizer": b"null"}
GREETINGS: dict[str, tuple[str, Fault]] = {
    **{name: ("/v1/models", faults.says(b'{"data": %s}' % data, "application/json")) for name, data in MODELS.items()},
    **{name: ("/tokenize", faults.says(b'{"tokens": %s}' % data, "application/json")) for name, data in TOKENS.items()},
    **{str(status): ("/v1/models", faults.refuses(status)) for status in (401, 404, 503)},
    "a page": ("/v1/models", faults.says(b"<html>")), "silence": ("/v1/models", faults.silent()),
    "an escape sequence": ("/v1/models", faults.says(b'{"data": [{"owned_by": "\\u001b[2J\\n"}]}')),
    "a redirect": ("/v1/models", faults.redirects("https://example.com/v1/models")),
    "gigabytes": ("/v1/models", faults.floods(b" " * 65536, "application/json")),
    "a gzip bomb": ("/v1/models", faults.gzip_bomb(1 << 28)),
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


LOADING = faults.refuses(503, '{"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}')


@pytest.mark.parametrize("api", ["llama-server", "vllm"])
def test_a_server_that_loads_its_model_was_never_there_and_is_waited_for(api: str) -> None:
    lines: list[str] = []
    with fake(api, TARGET) as server, closing(skydraft.connect(server.url, notify=lines.append)) as cloud:
        server.fault_of = loading = lambda path: None if path == "/v1/models" else LOADING
        threading.Timer(0.5, setattr, (server, "fault_of", lambda path: None)).start()
        assert "edge-fallback" not in write(cloud, "gated").run().origins
        assert len(lines) == 1 and "is not ready; waiting up to 30 s. The server answered 503: Loading" in lines[0]
        server.fault_of = loading
        says = r"was not reached .*Loading model.*wait longer with timeout_s"
        with closing(skydraft.connect(server.url, timeout_s=0.3, fallback="start")) as hasty:
            assert set(write(hasty, "gated").run().origins) == {"edge-fallback"}
        with closing(skydraft.connect(server.url, timeout_s=0.3)) as hasty, pytest.raises(CloudLost, match=says):
            write(hasty, "gated")


def test_a_server_on_this_machine_that_is_busy_for_a_moment_is_not_gone() -> None:
    with fake("llama-server", TARGET) as server, closing(skydraft.connect(server.url)) as cloud:
        assert write(cloud, "gated").run().token_ids
        server.fault_of = lambda path: faults.slow(1.2)
        assert "edge-fallback" not in write(cloud, "gated", length=2).run().origins


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
        server.storm(faults.floods(part, every_s=0.1))
        generation, began = write(cloud, plan, raw=kind != "openai"), time.monotonic()
        with suppress(SkydraftError):
            for _ in generation.rounds():
                time.sleep(0.1 * (plan == "gated"))
        assert time.monotonic() - began < 1.5 + 0.1 * len(generation.rounds_so_far)


def test_a_chat_that_gives_a_reason_with_each_slow_token_is_read_to_its_end() -> None:
    with fake("openai", TARGET, token_s=0.1) as server, closing(skydraft.connect(server.url, model="toy")) as cloud:
        server.storm(choices(lambda choice: choice | {"finish_reason": "stop"}))
        assert write(cloud, "cloud", raw=False, length=12).run().token_ids == ALONE[:12]


# --- Answers that are small to send and much to keep, or that no Python number, terminal or header can carry


def test_events_that_wait_are_not_unpacked() -> None:
    """2 MB of brackets are 30 MB of lists: 256 such events would be gigabytes."""
    event = b'data: {"choices": [{"token_ids": [%d]}], "x": [%s0]}\n\n' % (ALONE[0], b"[]," * 190_000)
    sent = list[int]()
    with fake("vllm", TARGET) as server, closing(skydraft.connect(f"{server.url}/v1")) as cloud:
        assert write(cloud, "cloud").run().token_ids == ALONE
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        server.storm(faults.floods(event, sent=sent))
        generation = write(cloud, "cloud")
        next(iter(generation))
        before = -1
        while len(sent) > before:
            before = len(sent)
            time.sleep(0.5)
        generation.close()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 200 * 1024


@pytest.mark.parametrize("part", [b"data: " + b"7" * 65536, b" " * 65536, b"data: {}\n\n" * 6000])
def test_gigabytes_are_not_read_to_the_end_of_patience(part: bytes) -> None:
    """What is too long for an answer is noticed by its length, long before the time is over."""
    sent: list[int] = []
    with fake("vllm", TARGET) as server, closing(skydraft.connect(server.url)) as cloud:
        server.storm(faults.floods(part, sent=sent))
        assert failure_of(write(cloud, "cloud"), "cloud")
    assert sum(sent) < 256 << 20


def test_a_long_event_is_cut_a_little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, encode = list[int](), DRAFT.vocab.encode
    monkeypatch.setattr(DRAFT.vocab, "encode", lambda text: lengths.append(len(text)) or encode(text))
    with fake("openai", TARGET) as server, closing(skydraft.connect(server.url)) as cloud:
        server.storm(faults.tells(*said("语速" * 20_000)))
        assert write(cloud, "cloud", raw=False, length=4).run().text == "语速" * 2
    assert 1000 < max(lengths) <= 1025


@pytest.mark.parametrize("url", ["socks5://u:SECRET@h", "socks://u:SECRET@h", "socks4://h", "ftp://h", "http://h:x"])
def test_a_proxy_that_cannot_be_used_is_one_clear_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", url)
    monkeypatch.setitem(sys.modules, "socksio", None)
    with pytest.raises(OptionError, match="ALL_PROXY") as failed:
        skydraft.connect("https://192.0.2.1/v1").facts(None)
    assert_one_clear_line(failed.value)
    assert "SECRET" not in str(failed.value)


# --- Texts of one process share a server: what fails for one of them costs the others nothing


@pytest.mark.parametrize("asks", ["a text that lost its server", "facts"])
def test_what_fails_for_one_text_breaks_no_stream_of_another(asks: str, unhurried: None) -> None:
    """A busy server leaves a sign of life unanswered: the other text reads on, in its one request."""
    with (
        fake("vllm", TARGET, token_s=0.05) as server,
        closing(skydraft.connect(server.url, timeout_s=2)) as cloud,
        ThreadPoolExecutor(1) as pool,
    ):
        assert cloud.facts(None) is not None
        stream, asked = pool.submit(write(cloud, "cloud").run), server.model.asked
        server.wait_until(lambda: any(each.num_written > 2 for each in asked))
        server.fault_of = lambda path: faults.hangs_up()
        if asks == "facts":
            cloud.servers.facts.clear()
            with pytest.raises(SkydraftError):
                cloud.facts(None)
        else:
            assert len(write(cloud, "gated").run().token_ids) == LENGTH
            lost = lambda each: not each.is_sound and each.path not in GENERATING  # noqa: E731
            server.wait_until(lambda: sum(map(lost, asked)) > 1 or stream.done())
        text = stream.result(20)
    assert text.token_ids == ALONE and text.receipt.calls == 1
