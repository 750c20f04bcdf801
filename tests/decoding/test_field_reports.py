"""Failures seen in practice that only a whole generation shows: F1, F6 and F15. Others are laws, or cases in tables:
F2, F3 and F8 in tests/engines/test_toy.py; F4 and F5 in tests/choosing/test_constraints.py; F7 in
tests/choosing/test_distribution.py; F9 to F12 in
tests/choosing/test_chinese_style.py, F11 in tests/gating/test_gates.py too; F13 in tests/choosing/test_stopping.py;
F14 in test_hand_back.py (whoever wrote a token chose it) and on the real pair;
F16 in tests/engines/test_omni.py."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import skydraft
from skydraft.config import DecodingParams
from skydraft.decoding.context import Context
from skydraft.decoding.plan import make_plan
from skydraft.engines.base import Sequence
from skydraft.engines.rows import Rows
from skydraft.engines.toy import ToyEngine, character_vocab, random_toy
from skydraft.gating import gates
from skydraft.types import DraftBlock

from .. import toys
from .judging import choices

VOCAB = character_vocab("今天天气很好我们去公园走，。员在的一是")


class Stale(ToyEngine):
    """After a rollback it goes on from the logits that it remembers."""

    last: Rows = None
    rolled_back = False

    def roll_back(self, sequence: Sequence, length: int) -> None:
        super().roll_back(sequence, length)
        self.rolled_back = True

    def forward(self, feeds: list[tuple[Sequence, list[int]]], *, want_logits: bool) -> list[Rows]:  # type: ignore[override]
        rows = super().forward(feeds, want_logits=want_logits)
        if want_logits:
            remembered, self.last = self.last, rows[0][-1].copy()
            if self.rolled_back:
                rows[0][-1] = remembered
            self.rolled_back = False
        return rows


@pytest.mark.parametrize(("kind", "follows"), [(ToyEngine, True), (Stale, False)])
def test_f1_a_stale_last_token_is_no_state_that_could_exist(kind: type[ToyEngine], follows: bool) -> None:
    """Draft, commit something else than was drafted, draft again: each block is the model's own continuation."""
    params = DecodingParams(max_new_tokens=200, min_new_tokens=200)
    drafter, context, found = toys.drafter_of(toys.toy(3, kind=kind), params), Context(toys.ASKED), []
    for number in range(6):
        block = drafter.draft(context, 3)
        found.append(list(block.token_ids) == choices(toys.toy(3), params, context.generated.tolist(), 3))
        other = (block.token_ids[-1] + 1) % 20
        context.commit_skip(DraftBlock(context.base, (*block.token_ids[: number % 4], other)), None)
    assert all(found) == follows


def reasons(cycle: str, k: int) -> list[str]:
    """Why a target that loves a cycle as much as the draft model was asked."""
    table = np.zeros((VOCAB.size, VOCAB.size), np.float32)
    for here, there in itertools.pairwise(VOCAB.encode("气" + cycle + cycle[0])):
        table[here, there] = 40
    sides = {"edge": ToyEngine(VOCAB, table), "cloud": ToyEngine(VOCAB, table)}
    plan, params = make_plan(gate="entropy:2", k=k), DecodingParams(max_new_tokens=32)
    with skydraft.generate("今天天气", **sides, plan=plan, params=params) as generation:
        return [record.reason for record in generation.run().records if record.reason]


@pytest.mark.parametrize("cycle", ["员", "员在", "员在的", "员在的一"])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 7])
def test_f6_a_confident_loop_forces_one_escalation_at_any_block_boundary(
    cycle: str, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gate on uncertainty alone never asks."""
    assert reasons(cycle, k) == ["repetition"]
    monkeypatch.setattr(gates, "unverified_cycles", lambda *_: [])
    assert reasons(cycle, k) == []


@pytest.mark.parametrize("eager", [False, True])
def test_f15_blocks_are_whole_unless_asked_otherwise(eager: bool) -> None:
    edge, cloud = random_toy(VOCAB, drift=0.5, scale=1.0), random_toy(VOCAB, scale=1.0)
    plan = make_plan(gate="entropy:1.5", k=4, eager=eager)
    with skydraft.generate(
        "今天天气", edge=edge, cloud=cloud, plan=plan, params=DecodingParams(max_new_tokens=60)
    ) as generation:
        lengths = {record.num_draft for record in generation.run().records if record.base + 4 <= 60}
    assert lengths == {4} if not eager else min(lengths) < 4
