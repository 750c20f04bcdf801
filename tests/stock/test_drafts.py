"""A device drafts for a vLLM: the text is what vLLM writes, in fewer steps, and nothing that fails loses a token."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.errors import OptionError
from tests import toys
from tests.serving import Serving, free_port
from tests.stock.conftest import SEED
from tests.stock.drafting import drafting_vllm
from tests.stock.fakes import GENERATING

PARAMS = DecodingParams(max_new_tokens=80, min_new_tokens=80)
STEP_S = 0.03


@pytest.fixture(autouse=True)
def on_any_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYDRAFT_DRAFTS_PORT", "0")
    monkeypatch.setattr("skydraft.edge.stock.connection.SAMPLE", toys.PROMPT)


def written(edge: Any, cloud: Any, params: DecodingParams = PARAMS) -> skydraft.Generation:
    return skydraft.generate(toys.PROMPT, edge=edge, cloud=cloud, plan=make_plan(), params=params, raw=True).run()


@pytest.fixture(scope="module")
def alone() -> tuple[int, ...]:
    target = toys.toy(SEED)
    plan = make_plan("cloud")
    return skydraft.generate(toys.PROMPT, cloud=target, plan=plan, params=PARAMS, raw=True).run().token_ids


@pytest.mark.parametrize("tells_names", [True, False])
@pytest.mark.parametrize(("drift", "most"), [(0.0, 0.75), (0.2, 0.95), (9.0, 1.0)])
def test_a_text_takes_fewer_steps_and_is_the_same(
    alone: tuple[int, ...], drift: float, most: float, tells_names: bool
) -> None:
    edge = toys.toy(SEED, drift)
    with (
        drafting_vllm(toys.toy(SEED), token_s=STEP_S, tells_names=tells_names) as (server, dialect, address),
        closing(skydraft.connect(server.url, drafts=address, require=True)) as cloud,
    ):
        for _ in range(2):  # the first text may begin before the connection is there
            dialect.forwards = 0
            done = written(edge, cloud)
            assert done.token_ids == alone
        assert dialect.forwards <= most * len(alone) + 1
        accepted = done.origins.count("accepted")
        assert accepted <= len(alone) - dialect.forwards + 1 and (drift > 1 or accepted > 10)
        assert sum(record.target.num_passes for record in done.records) >= dialect.forwards - 1


def test_eight_texts_of_two_devices_at_once(alone: tuple[int, ...]) -> None:
    with (
        drafting_vllm(toys.toy(SEED), token_s=STEP_S) as (server, dialect, address),
        closing(skydraft.connect(server.url, drafts=address, require=True)) as one,
        closing(skydraft.connect(server.url, drafts=address, require=True)) as other,
        ThreadPoolExecutor(8) as pool,
    ):
        for cloud in (one, other):
            written(toys.toy(SEED, 0.1), cloud)
        dialect.forwards = 0
        jobs = [pool.submit(written, toys.toy(SEED, 0.1), cloud) for cloud in [one, other] * 4]
        assert all(job.result().token_ids == alone for job in jobs)
        assert dialect.forwards < 0.97 * 8 * len(alone)


def test_a_port_that_is_not_there_is_said_once_and_the_text_streams(alone: tuple[int, ...]) -> None:
    said = list[str]()
    with (
        drafting_vllm(toys.toy(SEED)) as (server, *_),
        closing(skydraft.connect(server.url, drafts=f"127.0.0.1:{free_port()}", notify=said.append)) as cloud,
    ):
        for _ in range(3):
            assert written(toys.toy(SEED, 0.1), cloud).token_ids == alone
        assert len(said) == 1 and "vLLM writes alone" in said[0]


@pytest.mark.parametrize("what", ["port", "device", "vllm"])
def test_a_text_ends_right_whatever_dies_in_the_middle(alone: tuple[int, ...], what: str) -> None:
    edge, said = toys.toy(SEED, 0.1), list[str]()
    with (
        drafting_vllm(toys.toy(SEED), token_s=STEP_S) as (server, dialect, address),
        closing(skydraft.connect(server.url, drafts=address, require=True, notify=said.append)) as cloud,
    ):
        written(edge, cloud)
        port, texts = dialect.runner.drafts.port, dialect.runner.drafts._texts
        assert port is not None and texts is not None
        begun = skydraft.generate(toys.PROMPT, edge=edge, cloud=cloud, plan=make_plan(), params=PARAMS, raw=True)
        for index, _ in enumerate(begun.rounds()):
            if index == 3 and what == "port":
                port.close()
            if index == 3 and what == "vllm":
                server.kill()
                server.start()
            if index == 3 and what == "device":
                break
        if what == "device":
            begun.close()
            Serving.wait_until(lambda: texts.is_empty)
            assert written(edge, cloud).token_ids == alone
        else:
            assert begun.token_ids == alone
        if what == "port":
            Serving.wait_until(lambda: any("vLLM writes alone" in line for line in said))


def test_what_leaves_by_the_port_is_counted(alone: tuple[int, ...]) -> None:
    edge = toys.toy(SEED, 0.7)
    with (
        drafting_vllm(toys.toy(SEED), token_s=STEP_S) as (server, _, address),
        closing(skydraft.connect(server.url, drafts=address, require=True)) as cloud,
    ):
        for _ in range(2):
            before = cloud.spent.bytes_up
            done = written(edge, cloud)
        (request,) = [each.body for each in server.model.asked if each.path in GENERATING][-1:]
        content = len(json.dumps(request, separators=(",", ":")))
        receipt = done.receipt
        assert [seen.tokens for seen in receipt.seen] == [(0, len(alone))] and receipt.rejected
        assert cloud.spent.bytes_up - before == receipt.bytes_up > content + 4 * len(receipt.rejected)


def test_tokens_that_come_in_groups_are_noticed(alone: tuple[int, ...]) -> None:
    said = list[str]()
    with (
        drafting_vllm(toys.toy(SEED), interval=8) as (server, _, address),
        closing(skydraft.connect(server.url, drafts=address, require=True, notify=said.append)) as cloud,
    ):
        for _ in range(3):
            assert written(toys.toy(SEED, 9.0), cloud).token_ids == alone
    assert len(said) == 1 and "--stream-interval" in said[0]


def test_drafts_are_for_a_vllm() -> None:
    with pytest.raises(OptionError, match="drafts is for vLLM"):
        skydraft.connect("127.0.0.1:7373", drafts="127.0.0.1:7374")
    with pytest.raises(OptionError):
        skydraft.connect("http://127.0.0.1:8000/v1", drafts="nonsense:port")
