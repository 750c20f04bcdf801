"""Failures seen in practice that only a whole generation shows: F6 and F15. Others are laws, or cases in tables:
F1, F2, F3 and F8 in tests/engines/test_kv_cache.py; F4 and F5 in tests/choosing/test_chooser.py; F7 in
tests/choosing/test_distribution.py; F9 to F12 in
tests/choosing/test_chooser.py, F11 in tests/gating/test_gates.py too; F13 in tests/choosing/test_stopping.py;
F14 in test_hand_back.py (whoever wrote a token chose it) and on the real pair;
F16 in tests/engines/test_omni.py."""

from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import skydraft
from skydraft.cli.terminal import show_summary
from skydraft.config import DecodingParams
from skydraft.decoding.plan import make_plan
from skydraft.engines.toy import ToyEngine, character_vocab, random_toy

from ..choosing.test_stopping import follower
from ..serving import free_port

VOCAB = character_vocab("今天天气很好我们去公园走，。员在的一是")


def reasons(cycle: str, k: int) -> list[str]:
    """Why a target that loves a cycle as much as the draft model was asked."""
    sides = {"edge": follower(cycle, VOCAB), "cloud": follower(cycle, VOCAB)}
    plan, params = make_plan(gate="entropy:2", k=k), DecodingParams(max_new_tokens=32)
    done = skydraft.generate("今天天气", **sides, plan=plan, params=params).run()
    return [record.reason for record in done.records if record.reason]


@pytest.mark.parametrize("cycle", ["员", "员在", "员在的", "员在的一"])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 7])
def test_f6_a_loop_forces_one_escalation_at_any_boundary(cycle: str, k: int) -> None:
    """Of blocks; for a gate on uncertainty alone there is no reason, as the loop is confident."""
    assert reasons(cycle, k) == ["repetition"]


@pytest.mark.parametrize("cycle", ["员", "员在", "员在的一"])
@pytest.mark.parametrize("is_lost", [False, True])
def test_f6_a_loop_that_nobody_checks_is_left_by_a_seeded_draw(cycle: str, is_lost: bool) -> None:
    """In `edge`, and where the cloud is lost; not where it is there, nor where a user says so."""
    edge, there = follower(cycle, VOCAB), follower(cycle, VOCAB)

    def write(seed: int, **given: Any) -> skydraft.Generation:
        plan = make_plan("quality" if is_lost else "edge")
        params = DecodingParams(max_new_tokens=32, seed=seed)
        with closing(skydraft.connect(f"127.0.0.1:{free_port()}", timeout_s=0.2, fallback="start")) as cloud:
            return skydraft.generate("今天天气", edge=edge, cloud=cloud, plan=plan, params=params, **given).run()

    as_it_is, left = write(0, break_loops=False), write(0)
    num_seen = max(4 * len(cycle), 8)  # the token that would end the fourth copy is another one
    assert as_it_is.text == (cycle * 32)[:32] and as_it_is.stats.num_broken_loops == 0
    assert left.token_ids[: num_seen - 1] == as_it_is.token_ids[: num_seen - 1]
    assert left.token_ids[num_seen - 1] != as_it_is.token_ids[num_seen - 1] and left.stats.num_broken_loops > 0
    assert write(0).token_ids == left.token_ids
    if len(cycle) < 4:  # there the toy has one second choice
        assert any(write(seed).text != left.text for seed in range(1, 9))
    checked = skydraft.generate("今天天气", edge=edge, cloud=there, plan=make_plan("lossless", k=4)).run()
    assert checked.stats.num_broken_loops == 0
    if not is_lost:  # equal values of a list are no loop
        params = DecodingParams(max_new_tokens=32, grammar=f"regex:({cycle}){{32}}")
        listed = skydraft.generate("今天天气", edge=edge, plan=make_plan("edge"), params=params).run()
        assert listed.text == as_it_is.text


@pytest.mark.parametrize("k", [2, 5, 7])
def test_f6_a_long_loop_is_left(k: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The draft model says a sentence of 30 tokens over and over, and is sure; the target would end it at its second
    copy, and is asked nothing before. Alone it goes on, and the terminal says so."""
    words = "的一是在不了有和人这中大为上个国我以要他时来用们生到作地于出"
    vocab = character_vocab(words)
    sentence = [*vocab.encode(words)]
    table = np.zeros((vocab.size, vocab.size), np.float32)
    table[sentence, np.roll(sentence, -1)] = 40
    ending = table.copy()
    ending[sentence[-1], next(iter(vocab.end_ids))] = 80

    edge, cloud, params = ToyEngine(vocab, table), ToyEngine(vocab, ending), DecodingParams(max_new_tokens=150)
    plan = make_plan(gate="entropy:2", k=k)
    checked = skydraft.generate(words, edge=edge, cloud=cloud, plan=plan, params=params, raw=True)
    assert len(checked.token_ids) == 2 * len(words) + 1
    alone = skydraft.generate(words, edge=edge, plan=make_plan("edge"), params=params, raw=True).run()
    show_summary(alone, "never")
    assert len(alone.token_ids) == 150
    assert "ended by length, repeating itself" in capsys.readouterr().err


@pytest.mark.parametrize("ends_early", [False, True])
def test_f15_blocks_are_whole_but_in_modes_that_end_them_early(ends_early: bool) -> None:
    sides = {"edge": random_toy(VOCAB, drift=0.5, scale=1.0), "cloud": random_toy(VOCAB, scale=1.0)}
    plan = replace(make_plan(gate="entropy:1.5", k=4), ends_early=ends_early)
    done = skydraft.generate("今天天气", **sides, plan=plan, params=DecodingParams(max_new_tokens=60)).run()
    lengths = {record.num_draft for record in done.records if record.base + 4 <= 60}
    assert lengths == {4} if not ends_early else min(lengths) < 4
