"""A device drafts for a vLLM: the text is what vLLM writes, in fewer steps, and nothing that fails loses a token."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from io import BytesIO
from itertools import count
from socketserver import BaseRequestHandler, TCPServer
from threading import Thread
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from skydraft_vllm.port import Device
from skydraft_vllm.texts import Texts

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.edge.budget import Budget
from skydraft.edge.channel import shared_loop
from skydraft.edge.stock.drafts import DraftedText, DraftPort
from skydraft.edge.stock.ledger import Ledger
from skydraft.edge.tls import ServerOptions
from skydraft.errors import OptionError
from skydraft.types import Draft
from tests import toys
from tests.hostile.texts import TARGET, write
from tests.serving import free_port
from tests.stock.conftest import SEED
from tests.stock.fakes import DraftingVllm, Fake, drafting_vllm, fake

PARAMS = DecodingParams(max_new_tokens=80, min_new_tokens=80)
STEP_S = 0.03


@pytest.fixture(autouse=True)
def on_any_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYDRAFT_DRAFTS_PORT", "0")
    monkeypatch.setattr("skydraft.edge.stock.connection.SAMPLE", toys.PROMPT)


def begun(edge: Any, cloud: Any, mode: str = "lossless") -> Generation:
    return skydraft.generate(toys.PROMPT, edge=edge, cloud=cloud, plan=make_plan(mode), params=PARAMS, raw=True)


@contextmanager
def connected(edge: Any = None, **how: Any) -> Iterator[tuple[Fake, DraftingVllm, Any, str]]:
    """A vLLM, its dialect, a connection that has carried a text, since the first one may begin before the port is
    there, and where that is."""
    with (
        drafting_vllm(toys.toy(SEED), token_s=STEP_S) as (server, dialect, address),
        closing(skydraft.connect(server.url, drafts=address, require=True, **how)) as cloud,
    ):
        begun(edge or toys.toy(SEED, 0.1), cloud).run()
        dialect.forwards = 0
        yield server, dialect, cloud, address


@pytest.fixture(scope="module")
def alone() -> tuple[int, ...]:
    return begun(None, toys.toy(SEED), "cloud").run().token_ids


@pytest.mark.parametrize(("drift", "most"), [(0.0, 0.75), (0.2, 0.95), (9.0, 1.0)])
def test_a_text_takes_fewer_steps_and_is_the_same(alone: tuple[int, ...], drift: float, most: float) -> None:
    """What leaves by the port is counted, too."""
    edge = toys.toy(SEED, drift)
    with connected(edge) as (server, dialect, cloud, _):
        before = cloud.spent.bytes_up
        done = begun(edge, cloud).run()
        assert done.token_ids == alone and dialect.forwards <= most * len(alone) + 1
        accepted, receipt = done.origins.count("accepted"), done.receipt
        assert accepted <= len(alone) - dialect.forwards + 1 and (drift > 1 or accepted > 10)
        assert sum(record.target.num_passes for record in done.records) >= dialect.forwards - 1
        content = len(json.dumps(server.generating[-1].body, separators=(",", ":")))
        assert [seen.tokens for seen in receipt.seen] == [(0, len(alone))] and (drift < 1 or receipt.rejected)
        assert cloud.spent.bytes_up - before == receipt.bytes_up > content + 4 * len(receipt.rejected)


def test_eight_texts_of_two_devices_at_once(alone: tuple[int, ...]) -> None:
    with (
        connected() as (server, dialect, one, address),
        closing(skydraft.connect(server.url, drafts=address, require=True)) as other,
        ThreadPoolExecutor(8) as pool,
    ):
        begun(toys.toy(SEED, 0.1), other).run()
        dialect.forwards = 0
        jobs = [pool.submit(begun(toys.toy(SEED, 0.1), cloud).run) for cloud in [one, other] * 4]
        assert all(job.result().token_ids == alone for job in jobs)
        assert dialect.forwards < 0.97 * 8 * len(alone)


HELLO = b'{"version":1,"drafts":%s,"names":true}'


@pytest.mark.parametrize("says", [None, b"", b"[]", HELLO % b"[7]", HELLO % b"1e400", b"[" * 60_000, HELLO % b"7"])
def test_a_port_gone_or_hostile_is_said_once(alone: Any, monkeypatch: pytest.MonkeyPatch, says: bytes | None) -> None:
    monkeypatch.setattr("skydraft.edge.stock.drafts._PAUSE_S", 0.05)
    said, answers = list[str](), {"handle": lambda self: self.request.sendall(says + b"\n")}
    with (
        drafting_vllm(toys.toy(SEED), token_s=2e-3) as (server, *_),
        TCPServer(("127.0.0.1", 0), type("Port", (BaseRequestHandler,), answers)) as port,
    ):
        Thread(target=port.serve_forever, args=[0.01], daemon=True).start()
        where = f"127.0.0.1:{free_port() if says is None else port.server_address[1]}"
        with closing(skydraft.connect(server.url, drafts=where, notify=said.append)) as cloud:
            assert [begun(toys.toy(SEED, 0.1), cloud).run().token_ids for _ in range(3)] == [alone] * 3
        port.shutdown()
    assert len(said) == 1 and "vLLM writes alone" in said[0]


@pytest.mark.parametrize("what", ["port", "device", "vllm"])
def test_a_text_ends_right_whatever_dies_in_the_middle(alone: tuple[int, ...], what: str) -> None:
    edge, said = toys.toy(SEED, 0.1), list[str]()
    with connected(notify=said.append) as (server, dialect, cloud, _):
        text = begun(edge, cloud)
        rounds = text.rounds()
        for _ in range(4):
            next(rounds)
        if what == "device":
            text.close()
            server.wait_until(lambda: dialect.runner.drafts._texts.is_empty)
            text = begun(edge, cloud)
            rounds = text.rounds()
        elif what == "port":
            dialect.runner.drafts.port.close()
        else:
            server.kill()
            server.start()
        list(rounds)
        assert text.token_ids == alone
        if what == "port":
            server.wait_until(lambda: any("vLLM writes alone" in line for line in said))


def test_a_text_may_be_long_before_its_first_draft() -> None:
    texts, text = Texts(7, 64, 4096), np.arange(900, dtype=np.int32) % 60
    writer = Mock(**{"is_closing.return_value": False, "transport.get_write_buffer_size.return_value": 0})
    drafted = DraftedText(Mock(writer=writer, numbers=count(1)), text[:20], 20, Ledger(Budget()))
    drafted.draft(Draft(1, 880, (1, 2, 3)), text)
    device, sent = Device(texts), BytesIO(writer.write.call_args[0][0])
    while head := sent.read(5):
        device.take(head[:1], sent.read(int.from_bytes(head[1:], "little")))
    assert texts.drafts_for([[1]], [900], text[None], {drafted._name.hex: (0, 20)}, 0.0) == [[1, 2, 3]]


def test_a_port_that_reads_nothing_is_left_and_not_met_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skydraft.edge.stock.drafts._PAUSE_S", 0.0)

    async def leave(address: str) -> Any:
        port: Any = DraftPort(ServerOptions(address), print, Ledger(Budget()))
        await port.meet(10.0)
        port.writer.write(bytes(16 << 20))
        transport, _ = port.writer.transport, await port.close()
        return port.writer, port._work.done(), transport.get_write_buffer_size()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = shared_loop().begin(leave(f"127.0.0.1:{listener.getsockname()[1]}"))
        with listener.accept()[0] as silent:
            silent.sendall(HELLO % b"7" + b"\n")
            assert left.result(10.0) == (None, True, 0)


@pytest.mark.parametrize("kind", ["", "llama-server", "openai"])
def test_drafts_are_for_a_vllm(kind: str) -> None:
    with fake(kind or "vllm", TARGET) as server, pytest.raises(OptionError, match="drafts is for vLLM") as told:
        address = server.url if kind else server.url.removeprefix("http://")
        with closing(skydraft.connect(address, drafts="127.0.0.1:7374")) as cloud:
            write(cloud, "lossless", raw=kind != "openai").run()
    assert "\n" not in told.value.line and not server.model.num_written
    with pytest.raises(OptionError):
        skydraft.connect("http://127.0.0.1:8000/v1", drafts="nonsense:port")
