"""Answers that are small to send and much to keep, or that no Python number, terminal or header can carry."""

import resource
import sys
import time
from contextlib import closing

import pytest

import skydraft
from skydraft.edge.stock.dialect import count, name
from skydraft.edge.stock.wire import parsed
from skydraft.errors import CloudError, CloudFailure, OptionError
from tests.hostile.texts import ALONE, DRAFT, TARGET, assert_one_clear_line, write
from tests.stock import faults
from tests.stock.fakes import GENERATING, fake


def test_an_answer_in_crumbs_is_broken_off() -> None:
    """Each chunk costs the loop of all texts as much as a long one: a megabyte of them took 108 s."""
    sent = list[int]()
    with fake("vllm", TARGET) as server, closing(skydraft.connect(f"{server.url}/v1")) as cloud:
        server.fault_of = lambda path: faults.floods(b"x", sent=sent) if path in GENERATING else None
        assert "edge-fallback" in write(cloud, "gated").run().origins
    assert sum(sent) < 60_000


def test_events_that_wait_are_not_unpacked() -> None:
    """2 MB of brackets are 30 MB of lists: 256 such events would be gigabytes."""
    event = b'data: {"choices": [{"token_ids": [%d]}], "x": [%s0]}\n\n' % (ALONE[0], b"[]," * 190_000)
    sent = list[int]()
    with fake("vllm", TARGET) as server, closing(skydraft.connect(f"{server.url}/v1")) as cloud:
        assert write(cloud, "cloud").run().token_ids == ALONE
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        server.fault_of = lambda path: faults.floods(event, sent=sent) if path in GENERATING else None
        generation = write(cloud, "cloud")
        next(iter(generation))
        before = -1
        while len(sent) > before:
            before = len(sent)
            time.sleep(0.5)
        generation.close()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 200 * 1024


def test_an_answer_of_too_many_objects_is_not_parsed() -> None:
    with pytest.raises(CloudFailure, match="brackets"):
        parsed(b"[" + b"{}," * 200_001 + b"0]")
    assert len(parsed(b"[" + b"1," * 200_001 + b"0]")) == 200_002  # ids are many, and small


def test_a_long_event_is_cut_a_little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, encode = list[int](), DRAFT.vocab.encode
    monkeypatch.setattr(DRAFT.vocab, "encode", lambda text: lengths.append(len(text)) or encode(text))
    event = {"choices": [{"index": 0, "delta": {"content": "语速" * 20_000}}]}
    with fake("openai", TARGET) as server, closing(skydraft.connect(server.url)) as cloud:
        server.fault_of = lambda path: faults.tells(event) if path in GENERATING else None
        assert write(cloud, "cloud", raw=False, length=4).run().text == "语速" * 2
    assert 1000 < max(lengths) <= 1025


def test_a_count_that_no_price_can_be_made_of_is_none() -> None:
    """10**4000 tokens times a price is no float: the text ended with a traceback."""
    usage = {"completion_tokens": 10**4000}
    assert count(usage, "completion_tokens") == 0
    event = b'data: {"choices": [{"delta": {"content": "A"}}], "usage": {"completion_tokens": 1%s}}\n\n' % (b"0" * 4000)
    with fake("openai", TARGET) as server, closing(skydraft.connect(server.url, price="1,1,1")) as cloud:
        server.fault_of = lambda path: faults.says(event) if path in GENERATING else None
        assert write(cloud, "lossless", raw=False).run().receipt.cost


@pytest.mark.parametrize("text", ["\x1b]0;x\x07", "\ud800", "a\nb"])
def test_a_name_that_no_terminal_should_get_is_none(text: str) -> None:
    assert name(text) == "" and name("Qwen/语速 7B") == "Qwen/语速 7B"


@pytest.mark.parametrize("key", ["SECRET\r\nX: y", "SECRET密钥", "SECRET ", "SEC\0RET", ""])
def test_a_key_that_no_header_can_carry_is_refused_and_not_told(key: str) -> None:
    with pytest.raises(OptionError) as failed:
        skydraft.connect("http://127.0.0.1:9/v1", token=key)
    assert "SEC" not in str(failed.value)


@pytest.mark.parametrize("url", ["socks5://u:SECRET@h", "socks://u:SECRET@h", "socks4://h", "ftp://h", "http://h:x"])
def test_a_proxy_that_cannot_be_used_is_one_clear_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", url)
    monkeypatch.setitem(sys.modules, "socksio", None)
    with pytest.raises(OptionError, match="ALL_PROXY") as failed:
        skydraft.connect("https://192.0.2.1/v1").facts(None)
    assert_one_clear_line(failed.value)
    assert "SECRET" not in str(failed.value)
    monkeypatch.setenv("NO_PROXY", "192.0.2.1,other.example")
    with pytest.raises(CloudError):
        skydraft.connect("https://192.0.2.1/v1", timeout_s=0.1).facts(None)
