"""What only servers without skydraft can do wrong: in the handshake, to other texts, with huge answers. All else is in
`tests/hostile`, with the same promises.

Which model answers behind an address: what is learned there belongs to the model that the server names, and where
another one answers than before, while no text is under way, that is an error, and then all is well.
"""

import asyncio
import resource
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

import skydraft
from skydraft import DecodingParams, EngineOptions, api, make_plan
from skydraft.edge.stock.dialect import About
from skydraft.edge.stock.ids import LlamaServer
from skydraft.engines.base import Engine
from skydraft.errors import CloudLost, OptionError, SkydraftError, TargetChanged, VocabularyMismatch
from skydraft.lab.learning.calibrating import write_calibration
from skydraft.lab.learning.collect import Collector
from skydraft.lab.learning.dataset import weights_of
from skydraft.lab.learning.lessons import Store
from skydraft.models import KNOWN, cache_dir, default_pair
from skydraft.models.cache import model_path
from tests.cli.conftest import Invoke, invoke  # noqa: F401
from tests.evaluation import pairs
from tests.hostile.texts import ALONE, DRAFT, LENGTH, TARGET, assert_one_clear_line, failure_of, letters, write
from tests.serving import free_port
from tests.stock import faults
from tests.stock.conftest import llama_server, said
from tests.stock.fakes import GENERATING, IDS, fake
from tests.stock.faults import Fault, choices
from tests.thinking.scripts import thinking_toy

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


def test_lessons_of_two_models_do_not_mix_and_of_none_are_kept(tmp_path: Path, invoke: Invoke) -> None:  # noqa: F811
    said, names = list[str](), ["org/toy", "org/My-Toyota-7B", "org/" + "x" * 900]
    for dialect, name in [*(("vllm", name) for name in names), ("llama-server", "bad\x1bname")]:
        with fake(dialect, TARGET, name=name) as server, closing(skydraft.connect(server.url)) as cloud:
            assert cloud.facts(5.0) and not said
            collector = Collector(tmp_path, notify=said.append)
            collector.keep(write(cloud, "cloud").run())
            collector.close()
            if name not in names:
                with pytest.raises(OptionError, match="which model"):
                    weights_of(cloud)
    assert len(said) == 2 and "does not tell which model" in said[0]  # the reason, and at the end how many
    assert [lesson.target for lesson in Store(tmp_path).lessons(Counter())] == [f"name:{each}" for each in names]
    _, out, _ = invoke("learn", "status", str(tmp_path))
    assert "target org/toy)" in out and "target org/My-Toyota-7B)" in out


@pytest.mark.parametrize(("target", "served", "knows"), [
    ("toy", "toy", True), ("toy", "My-Toyota-7B", False), ("Toyota", "My-Toyota-7B", False), ("oy", "toy", False),
])  # fmt: skip
def test_a_calibration_fits_the_whole_name_alone(
    target: str, served: str, knows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path))
    made = pairs.calibration(0.3)
    write_calibration(made.model_copy(update={"target": made.target.model_copy(update={"name": target})}), tmp_path)
    with fake("vllm", TARGET, name=served) as server, closing(skydraft.connect(server.url)) as cloud:
        cloud.facts(5.0)
        assert api.is_calibrated(pairs.pair(0.3)[0], cloud) is knows


@pytest.mark.parametrize(("alias", "named"), [
    ("mine", "mine"), ("m.gguf", "/models/m.gguf"), ("unknown", "/models/m.gguf"), ("", "/models/m.gguf"),
])  # fmt: skip
def test_llama_server_is_named_by_its_alias_if_it_was_given_one(alias: str, named: str) -> None:
    answer = {"model_alias": alias, "model_path": "/models/m.gguf", "default_generation_settings": {"n_ctx": 64}}
    wire: Any = SimpleNamespace(ask=AsyncMock(return_value=answer))
    for wanted in (None, "m.gguf"):
        assert asyncio.run(LlamaServer().describe(wire, wanted, 1.0)) == {named: About(64, "/models/m.gguf")}
    assert asyncio.run(LlamaServer().describe(wire, "gguf", 1.0)) == {}


OTHER = letters("toy:drift=0.9")
OTHER_ALONE = write(OTHER, "cloud").run().token_ids


@pytest.mark.parametrize("plan", ["cloud", "gated"])
@pytest.mark.parametrize(
    ("dialect", "engine", "name", "error"),
    [("llama-server", OTHER, "toy", TargetChanged)]  # another file under the same name
    + [(each, OTHER, "another", TargetChanged) for each in IDS]
    + [(each, thinking_toy(), "toy", VocabularyMismatch) for each in IDS],
)
def test_another_model_is_told(dialect: str, engine: Engine, name: str, error: type[SkydraftError], plan: str) -> None:
    """Another model of an idle server is an error, and then the target."""
    with fake(dialect, TARGET) as server, closing(skydraft.connect(server.url, require=True)) as cloud:
        assert cloud.facts(None)
        for now, called in ((TARGET, "toy"), (engine, name)):  # the same model is no other
            assert len(write(cloud, plan).run().token_ids) == LENGTH
            server.kill()
            server.become(now, called)
            server.start()
        text = write(cloud, plan)
        with pytest.raises(error):
            text.run()
        assert text.rounds_so_far == ()
        if error is VocabularyMismatch:
            with pytest.raises(error):
                write(cloud, plan).run()
        else:
            assert (facts := cloud.facts(None)) and facts.name == name
            assert write(cloud, "cloud").run().token_ids == OTHER_ALONE


@pytest.mark.stock
def test_two_llama_servers_behind_one_port_one_after_the_other(gguf_path: Path) -> None:
    port, params, plan, found = free_port(), DecodingParams(max_new_tokens=12), make_plan("cloud"), list[Any]()
    with (
        closing(skydraft.load(str(gguf_path), EngineOptions(num_threads=1, context_len=512))) as edge,
        closing(skydraft.connect(f"http://127.0.0.1:{port}", require=True)) as cloud,
    ):
        for model in (gguf_path, model_path(KNOWN[default_pair().target], cache_dir())):
            with llama_server(model, context=512, port=port):
                if found:
                    with pytest.raises(TargetChanged, match=r"runs .*1\.5b.* now; this text began with .*0\.5b"):
                        skydraft.generate("What is TCP?", edge=edge, cloud=cloud, plan=plan, params=params).run()
                done = skydraft.generate("What is TCP?", edge=edge, cloud=cloud, plan=plan, params=params).run()
                found.append((done.text, cloud.facts(None)))
    (first, facts), (second, now) = found
    assert first and second and first != second and facts.weights != now.weights and "1.5b" in now.name
