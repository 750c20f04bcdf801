"""Failures seen in practice that only a whole generation shows: F1, F6 and F15. Others are laws, or cases in tables:
F2, F3 and F8 in tests/engines/test_toy.py; F4, F5 and F7 in tests/choosing/test_constraints.py; F9 to F12 in
tests/choosing/test_chinese_style.py, F11 in tests/gating/test_gates.py too; F13 in tests/choosing/test_stopping.py;
F14 in test_hand_back.py (whoever wrote a token chose it) and on the real pair;
F16 in tests/engines/test_omni.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import pytest

import skydraft
from skydraft.config import DecodingParams
from skydraft.decoding.context import Context
from skydraft.decoding.drafting import Drafter
from skydraft.decoding.loop import SpeculativeLoop
from skydraft.decoding.plan import make_plan
from skydraft.decoding.target import LocalVerifier
from skydraft.decoding.turns import GivenTurns
from skydraft.engines.base import Engine, Sequence
from skydraft.engines.rows import Rows
from skydraft.engines.toy import ToyEngine, character_vocab, random_toy
from skydraft.engines.vocab import Vocab
from skydraft.gating.gates import Gate, GateSpec, Reason, parse_gate
from skydraft.gating.hand_back import HandBack
from skydraft.types import DraftBlock, Prompt

CHARACTERS = "今天天气很好我们去公园走，。员在的一是"
VOCAB = character_vocab(CHARACTERS)
PROMPT = VOCAB.encode("今天天气")
GREEDY = DecodingParams(max_new_tokens=64)


def plain(engine: Engine, prefix: Iterable[int], num_tokens: int) -> list[int]:
    """The slow, obvious way: a fresh sequence for every token."""
    token_ids = list(prefix)
    start = len(token_ids)
    for _ in range(num_tokens):
        sequence = engine.open(token_ids)
        token_ids.append(int(sequence.extend(token_ids[-1:])[0].argmax()))
        sequence.close()
    return token_ids[start:]


def random_tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits by the last token, the one before and the position; bytes and the end are all but ruled out."""
    rng = np.random.default_rng(0)
    size = VOCAB.size
    last, previous, position = (rng.normal(0, 3, (rows, size)).astype(np.float32) for rows in (size, size, 7))
    last[:, len(set(CHARACTERS)) :] -= 20
    return last, previous * np.float32(0.5), position * np.float32(0.3)


LAST, PREVIOUS, POSITION = random_tables()


def model(kind: type[ToyEngine] = ToyEngine) -> ToyEngine:
    """The same weights in a sound engine, or in a broken one."""
    return kind(VOCAB, LAST, by_previous=PREVIOUS, by_position=POSITION)


def drafter_follows_the_context(engine: Engine) -> bool:
    """Draft, commit something else than was drafted, draft again: each block must be the model's own continuation."""
    prompt = Prompt(PROMPT)
    drafter, context = Drafter(engine, prompt, GREEDY, 200), Context(prompt)
    for round_number in range(6):
        block = drafter.draft(context, 3)
        if list(block.token_ids) != plain(model(), context.token_ids, 3):
            return False
        kept = block.token_ids[: round_number % 4]
        other = (block.token_ids[-1] + 1) % 20
        context.commit_skip(DraftBlock(context.base, (*kept, other)), None)
    return True


def test_f1_a_stale_last_token_is_no_state_that_could_exist() -> None:
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

    assert drafter_follows_the_context(model())
    assert not drafter_follows_the_context(model(Stale))


def cycling_table(cycle: str) -> np.ndarray:
    """Logits of a draft model that goes round a cycle, very sure of itself. [vocab, vocab]"""
    table = np.zeros((VOCAB.size, VOCAB.size), np.float32)
    ids = VOCAB.encode(cycle)
    for here, there in zip(ids, [*ids[1:], ids[0]], strict=True):
        table[here, there] = 40
    table[VOCAB.encode("气")[0], ids[0]] = 40
    return table


def escalations(cycle: str, k: int, gate: Gate) -> list[str]:
    """Why blocks of the cycle were escalated to a target that loves it as much."""
    edge, target = (ToyEngine(VOCAB, cycling_table(cycle)) for _ in range(2))
    prompt, params = Prompt(PROMPT), DecodingParams(max_new_tokens=32)
    drafter = Drafter(edge, prompt, params, 32, with_signals=True)
    verifier = LocalVerifier(target, prompt, params)
    rounds = list(SpeculativeLoop(Context(prompt), drafter, gate, verifier, GivenTurns(k, HandBack()), VOCAB).rounds())
    assert sum(len(done.token_ids) for done in rounds) == 32
    return [done.record.reason for done in rounds if done.record.outcome == "verified"]


@pytest.mark.parametrize("cycle", ["员", "员在", "员在的", "员在的一"])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 7])
def test_f6_a_confident_loop_forces_one_escalation_at_any_block_boundary(cycle: str, k: int) -> None:
    class Blind(Gate):
        """A gate on uncertainty alone."""

        def reason(self, generated: object, num_seen: int, block: DraftBlock, vocab: Vocab) -> Reason:
            return "uncertain" if self.is_unsure(block.signals) else ""

    assert escalations(cycle, k, Gate(parse_gate("entropy:2"))) == ["repetition"]
    assert escalations(cycle, k, Blind(GateSpec("entropy", 2.0))) == []


@pytest.mark.parametrize("cycle", ["员在", "员在的", "员在的一"])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 7])
def test_f6_one_escalation_breaks_the_loop_when_the_target_knows_better(cycle: str, k: int) -> None:
    table = np.zeros((VOCAB.size, VOCAB.size), np.float32)
    table[:, VOCAB.encode("公")[0]] = 40  # whatever went before
    path = VOCAB.encode("公园走")
    for here, there in itertools.pairwise(path):
        table[here, there] = 80
    edge_table = cycling_table(cycle)
    for here, there in itertools.pairwise([*path, *VOCAB.encode("今天我们去很好")]):
        edge_table[here, there] = 80  # once out of the loop, the draft model goes on as sure, and straight
    with skydraft.generate(
        "今天天气",
        edge=ToyEngine(VOCAB, edge_table),
        cloud=ToyEngine(VOCAB, table),
        plan=make_plan(gate="entropy:9", k=k),
        params=DecodingParams(max_new_tokens=3 * k + 3 * len(cycle)),
    ) as generation:
        text = generation.run().text
    reasons = [record.reason for record in generation.records if record.reason]
    looped, _, after = text.partition("公")
    assert reasons == ["repetition"]
    # Blocks before were skipped; the one that closed the second copy was escalated, and the target ended the loop.
    assert len(looped) < 2 * len(cycle) + k
    assert (cycle * 9).startswith(looped) and after.startswith("园走今天我们去"[: len(after)])


def test_f15_blocks_are_whole_unless_asked_otherwise() -> None:
    edge, cloud = random_toy(VOCAB, drift=0.5, scale=1.0), random_toy(VOCAB, scale=1.0)
    params = DecodingParams(max_new_tokens=60)

    def block_lengths(eager: bool) -> list[int]:
        plan = make_plan(gate="entropy:1.5", k=4, eager=eager)
        with skydraft.generate("今天天气", edge=edge, cloud=cloud, plan=plan, params=params) as generation:
            records = generation.run().records
            return [record.num_draft for record in records if record.base + 4 <= 60]

    assert set(block_lengths(eager=False)) == {4}
    assert min(block_lengths(eager=True)) < 4
