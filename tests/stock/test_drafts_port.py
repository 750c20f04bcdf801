"""The class that vLLM asks for drafts, and its port: whatever devices send, vLLM gets lists that it can take."""

import json
import random
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import numpy as np
import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st
from skydraft_vllm import Drafts
from skydraft_vllm.port import Device
from skydraft_vllm.settings import Settings, unfit
from skydraft_vllm.texts import Text, Texts, Times

from tests.serving import Serving
from tests.starting import ROOT
from tests.stock.fakes import MAX_LEN, FakeModelRunner, config
from tests.toys import law

K, VOCAB = 7, 64
until = Serving.wait_until
PROMPT = [*range(1, 13)]


@pytest.fixture(autouse=True)
def on_any_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYDRAFT_DRAFTS_PORT", "0")


class Phone:
    """A device, byte by byte."""

    def __init__(self, address: str, token: str = "", tls: ssl.SSLContext | None = None) -> None:
        where: Any = address.rsplit(":", 1)
        self.socket = socket.create_connection(where, 10.0)
        if tls:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")
        self.send(b"H", token.encode())
        self.heard = self.socket.makefile("rb").readline()

    @property
    def hello(self) -> Any:
        return json.loads(self.heard)

    def send(self, kind: bytes, content: bytes) -> None:
        self.socket.sendall(struct.pack("<cI", kind, len(content)) + content)

    def text(self, number: int, name: str, prompt: list[int]) -> None:
        head = struct.pack("<I16sI", number, bytes.fromhex(name), len(prompt))
        self.send(b"T", head + np.array(prompt[-8:], "<i4").tobytes())

    def draft(self, number: int, place: int, token_ids: list[int]) -> None:
        self.send(b"D", struct.pack("<II", number, place) + np.array(token_ids, "<i4").tobytes())

    def __enter__(self) -> "Phone":
        return self

    def __exit__(self, *_: Any) -> None:
        self.socket.close()


@pytest.fixture
def runner() -> Iterator[FakeModelRunner]:
    found = FakeModelRunner(K, VOCAB)
    yield found
    found.drafts.port.close()


def test_drafts_follow_their_text_from_row_to_row(runner: FakeModelRunner) -> None:
    name = uuid4().hex
    mine, other = (name, 12, [*PROMPT, 20]), ("", 12, [*PROMPT[::-1], 20])
    with Phone(runner.drafts.port.address) as phone:
        assert phone.hello == {"version": 1, "drafts": K, "names": True}
        phone.text(1, name, PROMPT)
        phone.draft(1, 0, [20, 21, 22, 23])
        until(lambda: runner.step([mine]) == [[21, 22, 23]])
        assert runner.step([other, mine]) == [[], [21, 22, 23]]
        assert runner.step([mine, other]) == [[21, 22, 23], []]
        for without in (
            other,  # mine is preempted
            (name, 12, PROMPT),  # a part of a prompt
            (name, 11, [*PROMPT, 20]),  # another prompt under this name
            (uuid4().hex, 12, [*PROMPT, 20]),  # another's text, with equal tokens
            grown := (name, 12, [*PROMPT, 20, 21, 22, 30]),  # the device does not know of the last token yet
        ):
            assert runner.step([without]) == [[]]
        phone.draft(1, 3, [30, *range(31, 45)])
        until(lambda: runner.step([grown]) == [[*range(31, 31 + K)]])
        near_end = (name, 12, [*PROMPT, 20, 21, 22, 30] + [50] * (MAX_LEN - 18))
        phone.draft(1, 4, [50] * 250)  # a message has 256 at most
        phone.draft(1, 254, [50] * (MAX_LEN - 268) + [51, 52, 53])
        until(lambda: runner.step([near_end]) == [[51]])  # never beyond what vLLM can hold
        phone.send(b"E", struct.pack("<I", 1))
        until(lambda: runner.drafts._texts.is_empty)
        phone.socket.settimeout(0.3)
        with pytest.raises(TimeoutError):  # a device learns nothing, not even whether its drafts were right
            phone.socket.recv(1)
        phone.text(2, name, PROMPT)
        until(lambda: not runner.drafts._texts.is_empty)
    until(lambda: runner.drafts._texts.is_empty)


own = st.integers(0, VOCAB - 1)
ids = st.lists(own, max_size=30) | st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)
messages = st.tuples(
    st.sampled_from([b"T", b"D", b"E", b"X", b"H"]), st.integers(0, 3), ids, st.integers(0, 40) | st.integers(0, 600)
)


@law(150)
@given(st.lists(messages, max_size=12), st.lists(st.lists(own, min_size=1), max_size=4))
def test_vllm_gets_short_lists_of_ids_whatever_comes(sent: Any, rows: list[list[int]]) -> None:
    runner = FakeModelRunner(K, VOCAB)
    device, name = Device(runner.drafts._texts), bytes(16)
    for kind, number, token_ids, num in sent:
        head = {b"T": struct.pack("<I16sI", number, name, num), b"D": struct.pack("<II", number, num)}
        try:
            device.take(kind, head.get(kind, struct.pack("<I", number)) + np.array(token_ids, "<i4").tobytes())
        except (ValueError, struct.error):
            device.end()
    for token_ids in rows:
        for prompt_len in (1, len(token_ids) - 1):
            (drafts,) = runner.step([(name.hex(), prompt_len, token_ids)])
            assert type(drafts) is list and len(drafts) <= K
            assert all(type(each) is int and 0 <= each < VOCAB for each in drafts)
    runner.drafts.port.close()


@pytest.mark.parametrize("given", [((None, None, None)), ([[1]], "no", None), ([[1]], np.zeros(1), np.zeros((1, 1)))])
def test_a_vllm_that_calls_otherwise_gets_no_drafts(runner: FakeModelRunner, given: Any) -> None:
    runner.drafts._texts.add(Text("a", 3, [1, 2, 3]))
    assert runner.drafts.propose(*given) in ([], [[]])


@pytest.mark.parametrize("most", [1, K])
def test_junk_costs_fewer_and_fewer_rows_and_is_tried_again(most: int) -> None:
    texts, row, counts = Texts(most, VOCAB, 4096), np.full((1, 4096), 5, np.int32), list[int]()
    texts.add(text := Text("a", 8, [5] * 8))
    for length in range(9, 3000):
        wrong = length < 1200
        text.ids = [5] * length + [6 if wrong else 5] * 8
        counts += [len(each) for each in texts.drafts_for([[5]], [length], row, {"a": (0, 8)}, length * 1.0)]
    assert counts[0] == counts[-1] == most
    assert sum(counts[100:1190]) < 0.05 * 1090 and any(counts[300:1190])


@pytest.mark.parametrize(("row_ms", "fed"), [(1.0, K), (8.0, K), (90.0, 0)])
def test_rows_that_do_not_pay_are_not_fed(row_ms: float, fed: int) -> None:
    times, gains, num_fed = Times(), 0.9 ** np.arange(1, K + 1), 0
    for _ in range(40):
        num_fed = times.best(1, gains, may_delay=True)
        times.note(1 + num_fed, 100 + row_ms * num_fed)
        times.note(1, 100.0)
    assert num_fed == fed
    assert times.best(1, gains, may_delay=False) <= (fed if row_ms < 1.5 else 1)


def test_a_pause_between_two_texts_is_no_step() -> None:
    texts, now = Texts(K, VOCAB, 4096), 0.0
    for index in range(17):
        now += (60.0, 0.1)[index % 2]
        texts.drafts_for([[5]], [9 + index % 2], np.zeros((1, 4096), np.int32), {}, now)
    assert texts._times._ms == {1: pytest.approx(100.0)}


def test_floods_and_half_open_connections_leave_places_to_others(
    runner: FakeModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skydraft_vllm.port._GREETING_S", 1.0)
    where = runner.drafts.port.address.rsplit(":", 1)
    with monkeypatch.context() as patch:
        patch.setattr(runner.drafts.port, "_begin", Mock(side_effect=RuntimeError))  # no more threads may run
        with socket.create_connection(where, 10.0) as refused:
            assert refused.recv(1) == b""
    silent, noise = [socket.create_connection(where, 10.0) for _ in range(100)], random.Random(0)
    until(lambda: runner.drafts.port._owners.total() > 0)
    until(lambda: not runner.drafts.port._owners)  # they said nothing, so their places are free again
    for _ in range(30):
        with socket.create_connection(where, 10.0) as rude:
            rude.sendall(noise.randbytes(200))
    with Phone(runner.drafts.port.address) as phone:
        assert phone.hello["drafts"] == K
        for number in range(200):
            phone.text(number, uuid4().hex, PROMPT)
        until(lambda: len(runner.drafts._texts._texts) == 32)
        phone.draft(199, 0, [VOCAB])
        assert phone.socket.recv(1) == b""  # an id that the vocabulary does not have
    for each in silent:
        each.close()


FLOOD = """
import socket, struct, sys, threading
def wrong_keys():
    while True:
        with socket.create_connection(sys.argv[1:3]) as each:
            each.sendall(struct.pack("<cI", b"X", 0))
            each.recv(1)
def junk():
    with socket.create_connection(sys.argv[1:3]) as each:
        each.sendall(struct.pack("<cI", b"H", 0) + struct.pack("<cIII", b"D", 8, 1, 0) * 10**7)
for work in (junk, junk, wrong_keys, wrong_keys):
    threading.Thread(target=work, daemon=True).start()
print("begun", flush=True)
sys.stdin.read()
"""


def test_a_flood_takes_a_small_share_of_the_processor_from_vllm(runner: FakeModelRunner) -> None:
    """While a thread of the port computes, vLLM's own thread waits for the interpreter."""
    command, pipe = [sys.executable, "-c", FLOOD, *runner.drafts.port.address.rsplit(":", 1)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as flood:
        assert flood.stdout is not None and flood.stdout.readline()
        time.sleep(1.0)  # what the port has saved up is spent
        used, began = time.process_time(), time.monotonic()
        time.sleep(3.0)
        share = (time.process_time() - used) / (time.monotonic() - began)
        with Phone(runner.drafts.port.address) as phone:
            assert phone.hello["drafts"] == K
        flood.kill()
    assert share < 0.06  # 0.9 without a limit


def test_a_device_needs_the_token_and_trusts_the_certificate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ca = trustme.CA()
    certificate = ca.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(tmp_path / "key")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert")
    (tmp_path / "tokens").write_text("# devices\nphone 0123456789abcdef\n")
    for name, value in {"TOKENS": "tokens", "TLS_CERT": "cert", "TLS_KEY": "key"}.items():
        monkeypatch.setenv(f"SKYDRAFT_DRAFTS_{name}", str(tmp_path / value))
    runner, tls = FakeModelRunner(K, VOCAB), ssl.create_default_context()
    ca.configure_trust(tls)
    for token in ("0123456789abcdef", "", "0123456789abcdeF"):
        with Phone(runner.drafts.port.address, token, tls) as phone:
            assert bool(phone.heard) == (token == "0123456789abcdef")
    runner.drafts.port.close()


LOSSY = config()
LOSSY.speculative_config.rejection_sample_method = "fly"
SHUT: list[tuple[dict[str, str], Any, str]] = [
    ({"HOST": "0.0.0.0"}, config(), "without TLS and tokens"), ({"PORT": "99999"}, config(), "no port"),
    ({"PORT": "x"}, config(), "no port"), ({"TOKEN": "x"}, config(), "SKYDRAFT_DRAFTS_TOKEN is unknown"),
    ({"TOKENS": "/nowhere"}, config(), "/nowhere"), ({}, config(rank=1, tensor_parallel_size=2), "first tensor"),
    ({}, config(pipeline_parallel_size=2), "pipeline"), ({}, LOSSY, "fly"), ({}, SimpleNamespace(), "no attribute"),
    ({}, config(), "does not reveal the names"),  # made by no model runner, which knows them
]  # fmt: skip


@pytest.mark.parametrize(("given", "of_vllm", "says"), SHUT)
def test_where_no_drafts_can_be_read_the_port_stays_shut_and_vllm_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given: dict[str, str], of_vllm: Any, says: str
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(f"SKYDRAFT_DRAFTS_{name}", value)
    drafts = Drafts(of_vllm)
    (line,) = caplog.messages
    assert says in line and "\n" not in line
    assert drafts.port is None and drafts.propose([[1], []], np.zeros(2), np.zeros((2, 2))) == [[], []]


def test_the_package_changes_none_of_vllms() -> None:
    assert '\ndependencies = ["numpy"]\n' in (ROOT / "skydraft-vllm" / "pyproject.toml").read_text()


def test_engines_of_one_vllm_listen_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYDRAFT_DRAFTS_PORT", "7500")
    assert [Settings.from_environment(index).port for index in range(3)] == [7500, 7501, 7502]
    assert not any(unfit(config(rank=rank, tensor_parallel_size=2)) for rank in (0, 2))
