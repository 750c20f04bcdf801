"""Many devices on one server: closed formulae where there are some, and laws of any server elsewhere."""

from __future__ import annotations

import itertools
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft.config import DecodingParams
from skydraft.decoding.cost_model import CostModel
from skydraft.engines.toy import open_toy
from skydraft.errors import OptionError
from skydraft.evaluation.devices import Load, Simulation, Text, Turn, most_devices
from skydraft.evaluation.replay import MODES, judging_ms, parse_forward_ms, record, text_of

from ..serving import serving
from ..toys import law
from . import pairs

K = 3


def block(accepted: int, draft_ms: float = 0.0, k: int = K) -> Turn:
    """A round of lossless."""
    return Turn(k * draft_ms, num_rows=k + 1, num_needed=accepted + 1, num_tokens=accepted + 1)


def stream(length: int) -> Text:
    """A text of mode cloud."""
    return Text((Turn(0.0, num_rows=1, num_needed=1, num_tokens=1, num_on=length - 1),))


def speed(texts: list[Text], costs: CostModel, num: int = 1) -> float:
    return Simulation(texts, costs, num).run().tokens_per_s


ms = st.floats(0.1, 99)
costs_of = st.builds(
    lambda steps, max_rows, wire_ms: CostModel(0.0, tuple(itertools.accumulate(steps)), max_rows, wire_ms, True),
    st.lists(ms, min_size=8, max_size=8), st.integers(1, 8), ms,
)  # fmt: skip
turns = st.builds(
    lambda edge_ms, skipped, rows, needed, tokens, on, read_ms: Turn(
        edge_ms, skipped, rows, min(needed, rows), tokens, on, read_ms
    ),
    ms, st.integers(0, 5), st.integers(1, 9), st.integers(1, 9), st.integers(1, 6), st.integers(0, 3), ms,
)  # fmt: skip
texts_of = st.lists(
    st.builds(Text, st.lists(turns, min_size=1, max_size=4).map(tuple), prefill_ms=ms, opens_ahead=st.booleans()),
    min_size=1, max_size=3,
)  # fmt: skip


@law(40)
@given(costs_of, st.floats(0, 30))
def test_one_device_gets_what_the_closed_formula_gives(costs: CostModel, draft_ms: float) -> None:
    costs = replace(costs, draft_ms=draft_ms)
    half = [block(accepted, draft_ms) for accepted, times in ((0, 4), (1, 2), (2, 1), (3, 1)) for _ in range(times)]
    for alpha, rounds in ((0.0, half[:1]), (0.5, half), (1.0, half[-1:])):
        assert speed([Text(tuple(rounds))], costs) == pytest.approx(costs.tokens_per_s(alpha, K))
    near = replace(costs, wire_ms=0.0)
    assert speed([stream(50)], near) == pytest.approx(near.tokens_per_s(0.5, 0))


@law(60)
@given(costs_of, texts_of, st.integers(2, 5))
def test_no_device_is_faster_among_others_than_alone(costs: CostModel, texts: list[Text], num: int) -> None:
    shared = Simulation(texts[:1], costs, num).run()  # all write the same text
    assert max(shared.speeds) <= speed(texts[:1], costs) * (1 + 1e-9)
    assert 0 < shared.busy <= 1 + 1e-9


@law(60)
@given(costs_of, texts_of, st.integers(1, 5))
def test_rows_and_tokens_are_conserved(costs: CostModel, texts: list[Text], num: int) -> None:
    """With one row a forward no row is computed in vain, and however many there are, none is computed twice."""
    one = Simulation(texts, replace(costs, max_rows=1), 1).run()
    every = [turn for text in texts for turn in text.turns]
    assert one.num_rows == one.num_forwards == sum(turn.num_needed + turn.num_on for turn in every)
    wide = Simulation(texts, replace(costs, max_rows=1000), num).run()
    least = num * sum(turn.num_rows + turn.num_on for turn in every)
    assert wide.num_rows >= least and (num > 1 or wide.num_rows == least)
    tokens = sum(turn.num_skipped + turn.num_tokens + turn.num_on for turn in every)
    alone_ms = sum(
        turn.edge_ms + costs.wire_ms + judging_ms(turn, costs) + turn.num_on * max(turn.read_ms, costs.pass_ms(1))
        for turn in every
    )
    least_ms = alone_ms - sum(turn.num_on * turn.read_ms for turn in every)
    assert 1e3 * tokens / speed(texts, costs) >= least_ms - 1e-6


@law(40)
@given(texts_of, st.integers(2, 6))
def test_a_server_that_takes_no_time_gives_every_device_its_own_speed(texts: list[Text], num: int) -> None:
    free = CostModel(0.0, (0.0,), 1000, wire_ms=5.0, streams=True)
    alone = [replace(text, prefill_ms=0.0) for text in texts]
    assert min(Simulation(alone[:1], free, num).run().speeds) == pytest.approx(speed(alone[:1], free), rel=0.02)


def test_a_stop_is_crossed_by_what_is_written_until_it_is_heard() -> None:
    """A far device gets many tokens more than it asked for."""
    costs = CostModel(0.0, (10.0,), 1, wire_ms=100.0, streams=True)
    turn = Turn(0.0, num_rows=1, num_needed=1, num_tokens=1, read_ms=5.0, stops=True)
    found = Simulation([Text((turn,))], costs, 1).run()
    # asked at 0, said at 60, read at 110, stopped at 115, heard at 165: the token of 170 is the last, here at 220
    num_tokens = 1 + (170 - 60) / 10
    assert found.tokens_per_s == pytest.approx(1e3 * num_tokens / 220)
    assert found.num_rows == num_tokens
    after = Turn(80.0, num_skipped=1)  # its 80 ms begin with the reading of one of the 11; the rest comes before
    found = Simulation([Text((turn, after))], costs, 1).run()
    assert found.tokens_per_s == pytest.approx(1e3 * (num_tokens + 1) / (220 + 10 * 5 + 80))


def test_waiting_rows_share_a_forward_and_a_prompt_holds_all() -> None:
    """Two streams: the second one's prompt is read before both go on together."""
    costs = CostModel(0.0, (10.0, 12.0), 2, streams=True)
    text = replace(stream(3), prefill_ms=30.0)
    found = Simulation([text], costs, 2).run(1)
    # 30 + 10 for the first token of one, 30 + 12 with the first of the other, 12 for the last of one, 10
    assert found.speeds[0] == pytest.approx(1e3 * 3 / 94)
    assert found.wait_ms is not None and found.wait_ms > 40


def test_devices_with_half_the_speed_are_counted() -> None:
    def load(num: int) -> Load:
        return Load((100.0 if num <= 3 else 300.0 / num,), 0.0, 1.0, 0, 0)

    assert [most_devices(load, most) for most in (1, 2, 5, 6, 7, 8, 100)] == [1, 2, 5, 6, 6, 6, 6]


def test_times_of_forwards_are_read_and_refused() -> None:
    assert parse_forward_ms("4:8, 1:5") == (5.0, 6.0, 7.0, 8.0) and parse_forward_ms("2:3") == (3.0, 3.0)
    for wrong in ("", "1", "1:0", "0:5", "1:5,2", "1:nan", "1:inf", "1:-5", "5000:7", "a:b"):
        with pytest.raises(OptionError, match="times of forwards"):
            parse_forward_ms(wrong)


def test_recorded_turns_have_the_tokens_and_rows_of_the_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path))
    edge, params = open_toy("toy:drift=0.3"), DecodingParams(max_new_tokens=40)
    with serving(open_toy("toy")) as server, closing(skydraft.connect(server.address)) as cloud:
        for mode in ("cloud", "lossless --k 5", "quality"):
            done = skydraft.generate(pairs.prompts(1)[0], edge=edge, cloud=cloud, plan=MODES[mode], params=params).run()
            text = text_of(done)
            tokens = sum(turn.num_skipped + turn.num_tokens + turn.num_on for turn in text.turns)
            crossed = len(done.token_ids) - tokens
            assert crossed == 0 or (crossed > 0 and any(turn.stops for turn in text.turns))
            rows = sum(turn.num_rows + turn.num_on for turn in text.turns)
            assert rows + crossed == sum(each.target.num_rows for each in done.records)
            assert sum(turn.num_rows > 0 for turn in text.turns) == sum(r.outcome == "verified" for r in done.records)
        found = record(edge, cloud, cloud.info(), pairs.prompts(1)[:2], 12)
    assert set(found.texts) == {"cloud", "lossless --k 5", "quality"} and list(found.refused) == ["auto"]
    assert "calibration" in found.refused["auto"] and math.isfinite(found.costs.pass_ms(1) + found.costs.wire_ms)
    other = found.with_times((7.0, 8.0))
    assert other.costs.pass_ms(2) == 8.0 and all(text.prefill_ms >= 7 for text in other.texts["cloud"])
