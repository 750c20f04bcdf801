"""A server without skydraft gives what its model gives in this process, whatever the gate, the draft and the seed; at a
temperature above 0, tokens of its model's own distribution.

A device drafts for a vLLM: the text is what vLLM writes, in fewer steps, and nothing that fails loses a token.
"""

import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from io import BytesIO
from itertools import count
from socketserver import BaseRequestHandler, TCPServer
from threading import Thread
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skydraft_vllm.port import Device
from skydraft_vllm.texts import Texts

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.edge.budget import Budget
from skydraft.edge.channel import shared_loop
from skydraft.edge.stock.drafts import DraftedText, DraftPort
from skydraft.edge.stock.ledger import Ledger
from skydraft.edge.tls import ServerOptions
from skydraft.engines.toy import open_toy
from skydraft.errors import OptionError
from skydraft.types import Draft
from tests import reference, toys
from tests.choosing.test_distribution import SIGNIFICANCE, p_value
from tests.decoding.test_laws import decode as decoded
from tests.edge.test_remote import gates
from tests.hostile.texts import TARGET, write
from tests.serving import free_port
from tests.stock.conftest import SEED
from tests.stock.fakes import IDS, DraftingVllm, Fake, drafting_vllm, fake
from tests.toys import PROMPT, PROMPT_IDS, VOCAB, law

plans = st.builds(
    lambda gate, k, back: make_plan(gate=gate, k=k, hand_back=back),
    gates, st.integers(1, 12), st.sampled_from(["0", "1", "4", "text"]),
)  # fmt: skip


decode = partial(decoded, execution="throughput")

ids = st.integers(0, len(toys.PIECES) - 1) | st.just(toys.EOS)  # else a text seldom ends by itself
FOLLOWED = {
    "logit_bias": st.dictionaries(ids, st.floats(-50, 50), max_size=3).map(lambda found: tuple(sorted(found.items()))),
    "repetition_penalty": st.floats(0.5, 2), "min_new_tokens": st.integers(1, 20),
    "frequency_penalty": st.floats(-2, 2), "presence_penalty": st.floats(-2, 2),
}  # fmt: skip
COUNTED = ("frequency_penalty", "presence_penalty")
NOT_THERE = {"vllm": (), "sglang": ("repetition_penalty",), "llama-server": ("min_new_tokens", *COUNTED)}
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


@law(200)
@given(st.sampled_from(IDS), st.sampled_from(toys.DRAFTERS), st.integers(1, 24), st.none() | plans, st.data())
def test_a_stock_server_is_local(
    clouds: dict[str, Any], dialect: str, drafter: Any, length: int, plan: Any, data: st.DataObject
) -> None:
    """Also with what changes the target's choices, which the server does by itself. Penalties that count what was
    written are for streams, since each request would count anew."""
    there = [each for each in FOLLOWED if each not in NOT_THERE[dialect] and not (plan and each in COUNTED)]
    chosen = {each: data.draw(FOLLOWED[each]) for each in there if data.draw(st.booleans())}
    if "repetition_penalty" in chosen:
        chosen.pop("logit_bias", None)  # which servers add before this penalty, and skydraft serve after it
    params, plan = DecodingParams(max_new_tokens=length, **chosen), plan or make_plan("cloud")
    edge = toys.toy(SEED, drafter[0], sign=drafter[1])
    far, near = (decode(plan, params, edge, target) for target in (clouds[dialect], toys.toy(SEED)))
    assert far.token_ids == near.token_ids
    assert (far.origins, far.finish_reason, far.text) == (near.origins, near.finish_reason, near.text)
    said = [[(r.base, r.num_draft, r.num_accepted, r.outcome) for r in each.records] for each in (far, near)]
    assert said[0] == said[1] or not plan.drafts


NUM_SEEDS = 200 * int(os.environ.get("SKYDRAFT_EXAMPLES", "1"))  # 1,600 in make test-long
MODEL = 104  # 0.42 of its first tokens end within a character: a llama-server does not tell these in a stream


@pytest.mark.parametrize(("dialect", "top_k", "top_p"), [("vllm", 0, 1.0), ("llama-server", 20, 0.6)])
def test_tokens_have_the_targets_distribution(
    dialect: str, top_k: int, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skydraft.edge.stock.connection.SAMPLE", PROMPT)
    edge, plan = toys.toy(MODEL, 0.7), make_plan(gate="always", k=3)
    counts, warping = np.zeros(VOCAB.size), DecodingParams(temperature=0.8, top_k=top_k, top_p=top_p)
    with fake(dialect, engine=toys.toy(MODEL)) as server, closing(skydraft.connect(server.url, require=True)) as cloud:
        for seed in range(NUM_SEEDS):
            params = DecodingParams(temperature=0.8, top_k=top_k, top_p=top_p, max_new_tokens=1, seed=seed)
            counts[decode(plan, params, edge, cloud).token_ids[0]] += 1
    row = reference.row_after(toys.toy(MODEL), PROMPT_IDS)
    assert p_value(counts, reference.probabilities(reference.warped(row, warping))) > SIGNIFICANCE


@pytest.mark.parametrize("dialect", IDS)
@pytest.mark.parametrize("drift", [0.0, 0.7])
def test_lossless_asks_a_stock_server_what_cloud_asks(clouds: dict[str, Any], dialect: str, drift: float) -> None:
    params, edge = DecodingParams(max_new_tokens=40), toys.toy(SEED, drift)
    done, alone = (decoded(make_plan(mode), params, edge, clouds[dialect]) for mode in ("lossless", "cloud"))
    assert done.token_ids == alone.token_ids and set(done.origins) == {"cloud"}
    assert done.stats.num_requests == alone.stats.num_requests and not any(each.num_draft for each in done.records)


@pytest.mark.parametrize("is_gated", [False, True])
def test_a_text_ends_where_the_servers_context_does(is_gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gated one goes on alone: the server is first asked when skipped tokens are beyond its context."""
    if is_gated:
        late = lambda gate, generated, *_: "uncertain" if len(generated) > 70 else ""  # noqa: E731
        monkeypatch.setattr("skydraft.gating.gates.Gate.reason", late)
    plan = make_plan(gate="entropy:2", k=6, hand_back="0") if is_gated else make_plan("cloud")
    edge, params = open_toy("toy:drift=0.2"), DecodingParams(max_new_tokens=120)
    with fake("vllm", engine=open_toy("toy", 64, 8)) as server, closing(skydraft.connect(server.url)) as cloud:
        done = skydraft.generate("语速", edge=edge, cloud=cloud, plan=plan, params=params).run()
    length = 120 if is_gated else 64 - done.num_prompt_tokens
    assert (done.finish_reason, len(done.token_ids)) == ("length", length)
    assert set(done.origins[78:]) == ({"edge-fallback"} if is_gated else set())


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


def test_tokens_that_come_in_groups_are_noticed(alone: tuple[int, ...]) -> None:
    said = list[str]()
    with (
        drafting_vllm(toys.toy(SEED), interval=8) as (server, _, address),
        closing(skydraft.connect(server.url, drafts=address, require=True, notify=said.append)) as cloud,
    ):
        for _ in range(3):
            assert begun(toys.toy(SEED, 9.0), cloud).run().token_ids == alone
    assert len(said) == 1 and "--stream-interval" in said[0]


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
