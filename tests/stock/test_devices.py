"""Many devices on a server without skydraft: its steps are measured, and its turns are replayed."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import skydraft
from skydraft.config import DecodingParams
from skydraft.decoding.cost_model import CostModel
from skydraft.edge.stock import load
from skydraft.edge.stock.costs import Costs
from skydraft.edge.stock.load import Steps, measure_steps
from skydraft.edge.stock.meeting import Met
from skydraft.edge.stock.vllm import Vllm
from skydraft.errors import CloudError, CloudFailure
from skydraft.evaluation.devices import Simulation, Text, Turn
from skydraft.evaluation.replay import MODES, new_prompts, record_stock, stock_costs, text_of
from tests.cli.conftest import Invoke, Refused, invoke, refused  # noqa: F401
from tests.hostile.texts import DRAFT, TARGET
from tests.stock import faults
from tests.stock.fakes import GENERATING, Fake, fake
from tests.stock.faults import Fault

COSTS = CostModel(0.0, (10.0,) * 64, 4096, wire_ms=0.0, streams=True)
PROMPTS = ("语速", "一位老人在讲故事", "音调")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path))


def test_a_draft_is_checked_token_by_token_and_the_rest_is_written_in_vain() -> None:
    """A step of five rows reads the prompt, two more steps check the draft, two are read on, one is nobody's."""
    turn = Turn(0.0, num_rows=5, num_needed=5, num_checked=2, num_tokens=3, num_on=2, read_ms=1.0, closes=True)
    last = Turn(100.0, num_skipped=4)
    found = Simulation([Text((turn, last))], COSTS, 1).run()
    # tokens come at 10, 20, 30, 40, 50; the second but last is read until 41, the last until 51
    assert found.tokens_per_s == pytest.approx(1e3 * 9 / 150)
    assert (found.num_rows, found.num_forwards) == (5 + 5, 6)  # the step that ends at 60 has begun when it is closed


def test_what_has_come_when_the_connection_is_closed_is_kept() -> None:
    stopped = Turn(0.0, num_rows=1, num_needed=1, num_tokens=1, read_ms=25.0, stops=True, closes=True)
    found = Simulation([Text((stopped, Turn(0.0, num_skipped=1)))], COSTS, 1).run()
    # one at 10; while it is read until 35, those of 20 and 30 come, and 25 of their 50 ms are spent after that
    assert found.tokens_per_s == pytest.approx(1e3 * 4 / (35 + 25))


def test_prompts_are_rows_beside_those_of_other_texts() -> None:
    """The second prompt waits for a step, and is then read in one with the first text's next token."""
    turn = Turn(0.0, num_rows=3, num_needed=3, num_tokens=1, num_on=3)
    found = Simulation([Text((turn,))], COSTS, 2).run(1)
    assert found.speeds == pytest.approx((1e3 * 4 / 40, 1e3 * 4 / 50))
    assert (found.num_rows, found.num_forwards) == (2 * (3 + 3) + 3, 6)  # the first has begun another text by then


def test_rows_that_are_only_read_add_what_reading_takes() -> None:
    """The first step reads four tokens and writes one, beside nothing; the second one beside a text that is written."""
    costs = stock_costs(Steps(((1, 10.0), (2, 16.0)), ((4, 8.0), (8, 9.0)), 2), 0.0)
    turn = Turn(0.0, num_rows=5, num_read=4, num_needed=5, num_tokens=1, num_on=1)
    assert Simulation([Text((turn,))], costs, 1).run().speeds == pytest.approx((1e3 * 2 / (18 + 10),))
    found = Simulation([Text((turn,))], costs, 2).run(1)
    assert found.speeds == pytest.approx((1e3 * 2 / (18 + 24), 1e3 * 2 / (18 + 24 + 10)))
    assert [costs.pass_ms(num + 1, num) - costs.pass_ms(1) for num in (2, 6)] == pytest.approx([4.0, 8.5])


@pytest.mark.parametrize("checks", [False, True])
def test_turns_have_the_tokens_and_the_rows_of_the_texts(checks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Met, "checks", lambda self, num_draft: checks and num_draft > 0)
    params = DecodingParams(max_new_tokens=40)
    with fake("vllm", TARGET) as server, closing(skydraft.connect(f"{server.url}/v1")) as cloud:
        for mode, prompt in itertools.product(("cloud", "quality"), PROMPTS):
            done = skydraft.generate(prompt, edge=DRAFT, cloud=cloud, plan=MODES[mode], params=params).run()
            turns = text_of(done, num_unread=7).turns
            num_crossed = len(done.token_ids) - sum(t.num_skipped + t.num_tokens + t.num_on for t in turns)
            assert num_crossed == 0 or (num_crossed > 0 and any(turn.stops for turn in turns))
            asked, verified = [t for t in turns if t.num_rows], [r for r in done.records if r.outcome == "verified"]
            assert all(turn.closes for turn in asked[:-1])
            for number, (turn, record) in enumerate(zip(asked, verified, strict=True)):
                num_new = turn.num_skipped + (1 if number else 7)
                assert turn.num_rows == turn.num_needed == num_new + checks * record.num_draft
                assert turn.num_checked == (0 if checks else record.num_committed - 1)


def test_steps_are_timed_with_several_texts_at_once() -> None:
    with fake("vllm", TARGET, token_s=0.02) as server, closing(skydraft.connect(f"{server.url}/v1")) as cloud:
        steps = cloud.steps(3)
    assert steps.num_texts == 3
    assert [num for num, _ in steps.writing] == [1, 2, 3] and [num for num, _ in steps.reading] == [4, 16, 64, 256]
    assert all(ms >= 19 for _, ms in steps.writing)  # a fake waits for each text by itself
    costs = stock_costs(steps, 1.0)
    assert costs.pass_ms(2) == steps.writing[1][1] and costs.pass_ms(129) > costs.pass_ms(2) and costs.wire_ms == 1.0


def timed(monkeypatch: pytest.MonkeyPatch, times: Iterator[list[float]], num: int) -> Steps:
    async def next_times(*_: Any) -> list[float]:
        return next(times)

    monkeypatch.setattr(load, "_times", next_times)
    wire: Any = None
    return asyncio.run(measure_steps(wire, Met(Vllm(), "m", 200, Costs(1.0)), num, 0.0, 1.0))


def test_a_server_that_lets_texts_wait_writes_fewer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, slow, later = ([base + at * gap for at in range(12)] for base, gap in ((0.0, 1.0), (0.0, 2.0), (30.0, 2.0)))
    times = iter([one, slow, slow, slow, later, later, *[[1e9]] * 9])
    found = timed(monkeypatch, times, 4)
    assert found.num_texts == 2 and found.writing == ((1, 1000.0), (2, 2000.0))
    assert [num for num, _ in found.reading] == [4, 16, 64]  # its context is shorter than the longest prompt


def test_a_server_that_sends_all_at_once_cannot_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CloudFailure, match="cannot be timed"):
        timed(monkeypatch, iter([[5.0] * 12]), 4)


def test_doctor_simulates_devices(invoke: Invoke) -> None:  # noqa: F811
    with fake("vllm", TARGET, token_s=0.002) as server:
        command = ("doctor", "--cloud", f"{server.url}/v1", "--edge-model", "toy:drift=0.3", "--devices", "3")
        _, out, _ = invoke(*command)
        _, other, _ = invoke(*command, "--forward-ms", "1:100,2:200")
    for text in (out, other):
        assert "devices      simulated with " in text and "lossless --k 5" not in text
        rows = [line for line in text.splitlines() if re.match(r"  \d+ +\d+\.\d ", line)]
        assert len(rows) == 3 and all(line.count(" ms ") == 2 for line in rows)  # 1, 2, 3 devices; cloud and quality
    assert "the forward times given" in other


def test_recorded_texts_are_of_a_stock_server() -> None:
    """Their prompts are new to it, but for the template's beginning."""
    with fake("llama-server", TARGET) as server, closing(skydraft.connect(server.url)) as cloud:
        found = record_stock(DRAFT, cloud, COSTS, new_prompts(PROMPTS), 12)
        lengths = [len(asked.prompts[0]) for asked in server.model.asked if asked.prompts]
    for texts in found.texts.values():
        rows = [next((turn.num_rows for turn in text.turns if turn.num_rows), None) for text in texts]
        assert all(num is None or len("音调") < num <= max(lengths) + 12 for num in rows)
    assert found.is_stock and set(found.texts) == {"cloud", "quality"} and list(found.refused) == ["auto"]
    slower = found.with_times((20.0,))
    assert slower.texts == found.texts and slower.costs.pass_ms(2) == 40.0


URL = ("doctor", "--edge-model", "toy:drift=0.3", "--devices", "3", "--cloud")


def fail_after(server: Fake, num_sound: int, fault: Fault) -> None:
    """All requests that generate fail so, after the next few."""
    left = [None] * num_sound
    server.fault_of = lambda path: (left.pop() if left else fault) if path in GENERATING else None


@pytest.mark.parametrize("spent", [False, True])
def test_texts_that_went_on_alone_are_not_simulated(spent: bool, invoke: Invoke) -> None:  # noqa: F811
    """The draft model alone is quick, whatever the server is."""
    with fake("vllm", TARGET, token_s=0.002) as server:
        if not spent:
            fail_after(server, 5 + 6 + 12 + 5, faults.refuses(500))  # all but the texts of the gated mode
        status, out, _ = invoke(*URL, f"{server.url}/v1", *(("--max-calls", "5") if spent else ()))
    assert status == 1 and "cannot be simulated" in out and "went on without the server" in out
    assert "devices      simulated" not in out


def test_a_server_that_sends_all_at_once_is_simulated_with_given_times(invoke: Invoke) -> None:  # noqa: F811
    with fake("vllm", TARGET, burst=100) as server:
        status, out, _ = invoke(*URL, f"{server.url}/v1")
        assert status == 1 and "round trip " in out and "To do: devices on " in out and "cannot be timed" in out
        status, out, _ = invoke(*URL, f"{server.url}/v1", "--forward-ms", "1:5,8:6")
    assert status == 0 and "devices      simulated with the forward times given" in out


def connected_steps(server: Fake, num_texts: int, **how: Any) -> Steps:
    with closing(skydraft.connect(f"{server.url}/v1", timeout_s=5, **how)) as cloud:
        return cloud.steps(num_texts)


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_refuses_some_of_the_texts_writes_fewer_at_once(status: int) -> None:
    with fake("vllm", TARGET, token_s=0.02) as server:
        num = itertools.count()
        refusal = faults.refuses(status)
        server.fault_of = lambda path: refusal if path in GENERATING and next(num) == 9 else None  # the last of four
        steps = connected_steps(server, 8)
        server.wait_until_idle()
        assert steps.num_texts == 3 and [num for num, _ in steps.writing] == [1, 2, 3]
        server.fault_of = lambda path: refusal if path in GENERATING else None
        with pytest.raises(CloudError, match=f"answered {status}"):
            connected_steps(server, 8)


def test_a_server_that_does_not_end_a_short_text_is_left() -> None:
    with fake("vllm", TARGET) as server:
        server.fault_of = lambda path: faults.ENDLESS if path in GENERATING else None
        with pytest.raises(CloudFailure, match="does not end"):
            connected_steps(server, 2)
        server.wait_until_idle()
        assert server.model.num_written < 2000


def test_prompts_that_are_measured_are_new_to_a_server_of_text() -> None:
    with fake("completions", TARGET, token_s=0.02) as server:
        connected_steps(server, 4, api="completions", model="toy")
        prompts = [asked.body["prompt"][:8] for asked in server.model.asked if asked.path in GENERATING]
    assert len(prompts) == 1 + 2 + 3 + 4 + 4 * 3 == len(set(prompts))
