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
from skydraft_vllm.port import Port
from skydraft_vllm.settings import Settings, unfit
from skydraft_vllm.texts import Text, Texts, Times

from tests.serving import Serving
from tests.stock.drafting import MAX_LEN, FakeModelRunner, config
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
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), 10.0)
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
    port_of(found).close()


def port_of(runner: FakeModelRunner) -> Port:
    assert runner.drafts.port is not None
    return runner.drafts.port


def drafts_of(runner: FakeModelRunner, rows: Any, at: int, wanted: Any) -> list[list[int]]:
    """The drafts of a step, once the port has read what was sent."""
    found: list[list[list[int]]] = []
    until(lambda: (found.append(runner.step(rows)), found[-1][at] == wanted)[1])
    return found[-1]


def test_drafts_follow_their_text_from_row_to_row(runner: FakeModelRunner) -> None:
    name = uuid4().hex
    mine, other = (name, 12, [*PROMPT, 20]), ("", 12, [*PROMPT[::-1], 20])
    with Phone(port_of(runner).address) as phone:
        assert phone.hello == {"version": 1, "drafts": K, "names": True}
        phone.text(1, name, PROMPT)
        phone.draft(1, 0, [20, 21, 22, 23])
        assert drafts_of(runner, [mine], 0, [21, 22, 23]) == [[21, 22, 23]]
        assert runner.step([other, mine]) == [[], [21, 22, 23]]
        assert runner.step([mine, other]) == [[21, 22, 23], []]
        assert runner.step([other]) == [[]]  # preempted
        grown = (name, 12, [*PROMPT, 20, 21, 22, 30])
        assert runner.step([grown]) == [[]]  # the device does not know of the last token yet
        phone.draft(1, 3, [30, *range(31, 45)])
        drafts_of(runner, [grown], 0, [*range(31, 31 + K)])
        near_end = (name, 12, [*PROMPT, 20, 21, 22, 30] + [50] * (MAX_LEN - 18))
        phone.draft(1, 4, [50] * (MAX_LEN - 18) + [51, 52, 53])
        until(lambda: runner.step([near_end])[0] in ([51], []))  # never beyond what vLLM can hold
    until(lambda: runner.drafts._texts is not None and runner.drafts._texts.is_empty)


def test_a_row_whose_prompt_was_not_written_has_no_drafts(runner: FakeModelRunner) -> None:
    name = uuid4().hex
    with Phone(port_of(runner).address) as phone:
        phone.text(1, name, PROMPT)
        phone.draft(1, 0, [20, 21])
        drafts_of(runner, [(name, 12, [*PROMPT, 20])], 0, [21])
        assert runner.step([(name, 12, PROMPT)]) == [[]]  # a part of a prompt
        assert runner.step([(name, 11, [*PROMPT, 20])]) == [[]]  # another prompt under this name
        assert runner.step([(uuid4().hex, 12, [*PROMPT, 20])]) == [[]]  # another's text, with equal tokens


def test_the_port_tells_a_device_nothing_about_texts(runner: FakeModelRunner) -> None:
    """Whether its drafts were right, too."""
    with Phone(port_of(runner).address) as phone:
        for number, drafts in enumerate([[20, 21], [9, 9]]):
            phone.text(number, name := uuid4().hex, PROMPT)
            phone.draft(number, 0, drafts)
            for length in range(1, 40):
                runner.step([(name, 12, [*PROMPT, *range(20, 20 + length)])])
            phone.send(b"E", struct.pack("<I", number))
        phone.socket.settimeout(0.3)
        with pytest.raises(TimeoutError):
            phone.socket.recv(1)


ids = st.integers(-(2**31), 2**31 - 1)
messages = st.one_of(
    st.tuples(st.just(b"T"), st.integers(0, 3), st.lists(ids, max_size=20), st.integers(0, 40)),
    st.tuples(st.just(b"D"), st.integers(0, 3), st.lists(st.integers(0, VOCAB - 1), max_size=30), st.integers(0, 600)),
    st.tuples(st.sampled_from([b"E", b"X", b"H"]), st.integers(0, 3), st.just([]), st.just(0)),
)


@law(150)
@given(st.lists(messages, max_size=12), st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1), max_size=4))
def test_vllm_gets_short_lists_of_ids_whatever_comes(sent: Any, rows: list[list[int]]) -> None:
    from skydraft_vllm.port import Device

    runner = FakeModelRunner(K, VOCAB)
    texts = runner.drafts._texts
    assert texts is not None
    device, name = Device(texts), bytes(16)
    for kind, number, token_ids, num in sent:
        packed = np.array(token_ids, np.int64).astype("<i4").tobytes()
        head = {b"T": struct.pack("<I16sI", number, name, num), b"D": struct.pack("<II", number, num)}
        try:
            device.take(kind, head.get(kind, struct.pack("<I", number)) + packed)
        except (ValueError, struct.error):
            device.end()
    for token_ids in rows:
        for prompt_len in (1, len(token_ids) - 1):
            (drafts,) = runner.step([(name.hex(), prompt_len, token_ids)])
            assert type(drafts) is list and len(drafts) <= K
            assert all(type(each) is int and 0 <= each < VOCAB for each in drafts)
    port_of(runner).close()


@pytest.mark.parametrize("given", [((None, None, None)), ([[1]], "no", None), ([[1]], np.zeros(1), np.zeros((1, 1)))])
def test_a_vllm_that_calls_otherwise_gets_no_drafts(runner: FakeModelRunner, given: Any) -> None:
    texts = runner.drafts._texts
    assert texts is not None
    texts.add(Text("a", 3, [1, 2, 3]))
    found = runner.drafts.propose(*given)
    assert found in ([], [[]])


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
    times = Times()
    gains = 0.9 ** np.arange(1, K + 1)
    counts = []
    for _ in range(40):
        counts.append(times.best(1, gains, may_delay=True))
        times.note(1 + counts[-1], 100 + row_ms * counts[-1])
        times.note(1, 100.0)
    assert counts[-1] == fed
    assert times.best(1, gains, may_delay=False) <= (fed if row_ms < 1.5 else 1)


def test_a_pause_between_two_texts_is_no_step() -> None:
    texts, now = Texts(K, VOCAB, 4096), 0.0
    for index in range(17):
        now += (60.0, 0.1)[index % 2]
        texts.drafts_for([[5]], [9 + index % 2], np.zeros((1, 4096), np.int32), {}, now)
    assert texts._times._ms == {1: pytest.approx(100.0)}


def test_floods_and_half_open_connections_leave_places_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skydraft_vllm.port._GREETING_S", 1.0)
    runner = FakeModelRunner(K, VOCAB)
    host, port = port_of(runner).address.rsplit(":", 1)
    with monkeypatch.context() as patch:
        patch.setattr(port_of(runner), "_begin", Mock(side_effect=RuntimeError))  # no more threads may run
        with socket.create_connection((host, int(port)), 10.0) as refused:
            assert refused.recv(1) == b""
    silent = [socket.create_connection((host, int(port))) for _ in range(100)]
    time.sleep(1.5)  # they said nothing, so their places are free again
    noise = random.Random(0)
    for _ in range(30):
        with socket.create_connection((host, int(port))) as rude:
            rude.sendall(noise.randbytes(200))
    with Phone(port_of(runner).address) as phone:
        assert phone.hello["drafts"] == K
        for number in range(200):
            phone.text(number, uuid4().hex, PROMPT)
        until(lambda: runner.drafts._texts is not None and len(runner.drafts._texts._texts) == 32)
        phone.send(b"D", struct.pack("<II", 199, 0) + np.array([VOCAB], "<i4").tobytes())
        assert phone.socket.recv(1) == b""  # an id that the vocabulary does not have
    for each in silent:
        each.close()
    until(lambda: not port_of(runner)._owners)
    port_of(runner).close()


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


def test_a_flood_takes_a_small_share_of_the_processor_from_vllm() -> None:
    """While a thread of the port computes, vLLM's own thread waits for the interpreter."""
    runner = FakeModelRunner(K, VOCAB)
    host, port = port_of(runner).address.rsplit(":", 1)
    command, pipe = [sys.executable, "-c", FLOOD, host, port], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as flood:
        assert flood.stdout is not None and flood.stdout.readline()
        time.sleep(1.0)  # what the port has saved up is spent
        used, began = time.process_time(), time.monotonic()
        time.sleep(3.0)
        share = (time.process_time() - used) / (time.monotonic() - began)
        with Phone(port_of(runner).address) as phone:
            assert phone.hello["drafts"] == K
        flood.kill()
    port_of(runner).close()
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
    with Phone(port_of(runner).address, "0123456789abcdef", tls) as phone:
        assert phone.hello["version"] == 1
    for token in ("", "0123456789abcdeF"):
        with Phone(port_of(runner).address, token, tls) as phone:
            assert phone.heard == b""
    port_of(runner).close()


@pytest.mark.parametrize(("given", "says"), [
    ({"HOST": "0.0.0.0"}, "without TLS and tokens"), ({"PORT": "99999"}, "no port"), ({"PORT": "x"}, "no port"),
    ({"TOKEN": "x"}, "SKYDRAFT_DRAFTS_TOKEN is unknown"), ({"TOKENS": "/nowhere"}, "/nowhere"),
])  # fmt: skip
def test_wrong_settings_are_one_line_and_vllm_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given: dict[str, str], says: str
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(f"SKYDRAFT_DRAFTS_{name}", value)
    drafts = Drafts(config())
    (line,) = caplog.messages
    assert says in line and "\n" not in line
    assert drafts.port is None and drafts.propose([[1], []], np.zeros(2), np.zeros((2, 2))) == [[], []]


def test_where_no_drafts_can_be_read_the_port_stays_shut(caplog: pytest.LogCaptureFixture) -> None:
    """The last one is made by no model runner, which knows the names of texts."""
    lossy = config()
    lossy.speculative_config.rejection_sample_method = "fly"
    others = (
        config(rank=1, tensor_parallel_size=2),
        config(pipeline_parallel_size=2),
        lossy,
        SimpleNamespace(),
        config(),
    )
    for each in others:
        assert Drafts(each).port is None
    assert len(caplog.messages) == len(others)
    assert not unfit(config(rank=2, tensor_parallel_size=2)) and not unfit(config(rank=0, tensor_parallel_size=2))


def test_engines_of_a_data_parallel_vllm_listen_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYDRAFT_DRAFTS_PORT", "7500")
    assert [Settings.from_environment(index).port for index in range(3)] == [7500, 7501, 7502]
