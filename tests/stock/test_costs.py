"""What a server costs is measured once and remembered, for a day; what it cannot follow is refused before a token."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.errors import BudgetSpent, OptionError
from tests.hostile.texts import DRAFT, PLANS, TARGET, write
from tests.stock import faults
from tests.stock.fakes import Fake, fake


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path))
    return tmp_path / "servers.json"


def num_measured(server: Fake) -> int:
    """How many requests a first contact takes that generate: three of them measure."""
    before = len(server.model.asked)
    with closing(skydraft.connect(f"{server.url}/v1")) as cloud:
        assert cloud.facts(None) is not None
    return sum(asked.path == "/v1/completions" for asked in server.model.asked[before:])


def test_costs_are_measured_once_and_again_after_a_day(memory: Path) -> None:
    with fake("vllm", TARGET) as server:
        assert (num_measured(server), num_measured(server)) == (3, 0)
        known = json.loads(memory.read_text())
        [key] = known
        assert key == f"{server.url}/v1 toy" and known[key]["write_ms"] > 0
        known[key]["at"] = time.time() - 90_000
        memory.write_text(json.dumps(known))
        assert (num_measured(server), num_measured(server)) == (3, 0)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda good: good | {"write_ms": 0}, lambda good: good | {"check_ms": [1e400]}, lambda good: {},
        lambda good: good | {"at": good["at"] + 1e6}, lambda good: None,
    ],
)  # fmt: skip
def test_costs_that_cannot_be_are_measured_again(memory: Path, spoil: Callable[[Any], Any]) -> None:
    with fake("vllm", TARGET) as server:
        assert num_measured(server) == 3
        memory.write_text(json.dumps({key: spoil(good) for key, good in json.loads(memory.read_text()).items()}))
        assert num_measured(server) == 3
        memory.write_bytes(b"{")
        assert num_measured(server) == 3


def test_measuring_is_paid_for_and_takes_no_call_of_a_text(memory: Path) -> None:
    for price, in_budget in (("0,0,1", 14e-6), ("0,1,0", 661e-6)):  # 15 tokens written after 662 that were read
        memory.unlink(missing_ok=True)
        spent = memory.with_name("spent.json")
        with fake("vllm", TARGET) as server:
            how: Any = {"price": price, "max_cost": in_budget, "max_calls": 1}
            with closing(skydraft.connect(f"{server.url}/v1", **how)) as cloud:
                assert cloud.facts(None) is not None
                with pytest.raises(BudgetSpent, match="Today's requests have cost"):
                    write(cloud, "cloud").run()
            with closing(skydraft.connect(f"{server.url}/v1", **how)) as cloud, pytest.raises(BudgetSpent):
                write(cloud, "cloud").run()  # the day is the same
            spent.unlink()
            with closing(skydraft.connect(f"{server.url}/v1", **how)) as cloud:  # it remembers the costs
                assert cloud.facts(None) is not None and write(cloud, "cloud").run().token_ids
    with fake("vllm", TARGET) as server, closing(skydraft.connect(f"{server.url}/v1", max_calls=1)) as cloud:
        assert cloud.facts(None) is not None and write(cloud, "cloud").run().token_ids


def test_another_model_at_the_address_is_measured(memory: Path) -> None:
    with fake("vllm", TARGET) as server:
        assert num_measured(server) == 3
        server.become(TARGET, "another")
        assert num_measured(server) == 3 and len(json.loads(memory.read_text())) == 2


def test_what_doctor_says_is_measured_now(memory: Path) -> None:
    with fake("vllm", TARGET) as server, closing(skydraft.connect(f"{server.url}/v1")) as cloud:
        assert num_measured(server) == 3
        for _ in range(2):
            before = len(server.model.asked)
            cloud.examine(DRAFT.vocab)
            assert sum(asked.path == "/v1/completions" for asked in server.model.asked[before:]) >= 5  # 2 of its cache


@pytest.mark.parametrize("plan", ["gated", "cloud"])
def test_top_k_is_refused_before_the_first_token_of_a_server_of_text(plan: str) -> None:
    params = DecodingParams(temperature=0.8, top_k=40, max_new_tokens=8)
    skydraft_gateway = faults.says(b'{"data": [{"id": "toy", "owned_by": "skydraft"}]}', "application/json")
    with fake("completions", TARGET) as server, closing(skydraft.connect(f"{server.url}/v1")) as cloud:
        server.fault_of = lambda path: skydraft_gateway if path == "/v1/models" else None
        cloud.ping(10.0)  # what is slow the first time
        with pytest.raises(OptionError, match=r"top.k"):
            skydraft.generate("语速", edge=DRAFT, cloud=cloud, plan=PLANS[plan], params=params)
        never = make_plan(gate="never", k=4)
        assert len(skydraft.generate("语速", edge=DRAFT, plan=never, params=params).run().token_ids) == 8
