"""Failures seen in practice, F1 to F8. Each check passes on the product and is shown to fail on the broken variant."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import numpy as np
import pytest

import skydraft
from skydraft.choosing import constraints
from skydraft.choosing.chooser import Chooser
from skydraft.choosing.noise import gumbel_noise
from skydraft.choosing.sampling import sample
from skydraft.config import DecodingParams, decoding_params
from skydraft.decoding.context import Context
from skydraft.decoding.drafting import Drafter
from skydraft.decoding.loop import SpeculativeLoop
from skydraft.decoding.plan import make_plan
from skydraft.decoding.target import LocalVerifier
from skydraft.engines.base import Engine, Rows, Sequence
from skydraft.engines.toy import ToyEngine, character_vocab
from skydraft.engines.vocab import Vocab
from skydraft.errors import EngineError
from skydraft.gating.gates import Gate, GateSpec, History, Reason, ThresholdGate, parse_gate
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
    last, previous, position = (
        rng.normal(0, 3, (rows, VOCAB.size)).astype(np.float32) for rows in (VOCAB.size, VOCAB.size, 7)
    )
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


class TwiceAdvanced(ToyEngine):
    """Writes the KV of every single new token twice."""

    def forward(self, feeds: list[tuple[Sequence, list[int]]], *, want_logits: bool) -> list[Rows]:  # type: ignore[override]
        rows = super().forward(feeds, want_logits=want_logits)
        if want_logits:
            super().forward([(sequence, token_ids[-1:]) for sequence, token_ids in feeds], want_logits=False)
        return rows


class TwiceAndSilent(TwiceAdvanced):
    """The same, with a cache that does not tell its length."""

    def kv_length(self, sequence: Sequence) -> int:
        return sequence.length


def replays_alike(engine: Engine) -> bool:
    """Logits after extend, truncate and extend again equal those of a sequence that never left the path."""
    token_ids = [int(i) for i in np.random.default_rng(0).integers(0, 20, 40)]
    sequence = engine.open(PROMPT)
    for keep in (3, 9, 5, 14, 1):
        sequence.extend(token_ids[:keep])
        sequence.truncate(len(PROMPT) - 1)
        got = sequence.extend(token_ids)
        fresh = engine.open([*PROMPT[:-1], token_ids[0]]).extend(token_ids)
        if not np.array_equal(got, fresh):
            return False
        sequence.truncate(len(PROMPT) - 1)
    return True


def test_f2_a_cache_advanced_twice_is_caught() -> None:
    assert replays_alike(model())
    with pytest.raises(EngineError, match="KV cache holds"):
        replays_alike(model(TwiceAdvanced))
    sequence = model(TwiceAndSilent).open(PROMPT)
    step_by_step = [sequence.extend([token_id])[0] for token_id in PROMPT]
    assert not np.array_equal(step_by_step, model().open(PROMPT).extend(PROMPT))


def test_f3_a_rollback_that_does_not_happen_is_caught() -> None:
    class NoRollback(ToyEngine):
        def roll_back(self, sequence: Sequence, length: int) -> None:
            return None

    class SilentNoRollback(NoRollback):
        def kv_length(self, sequence: Sequence) -> int:
            return sequence.length

    with pytest.raises(EngineError, match="KV cache holds"):
        replays_alike(model(NoRollback))
    assert not replays_alike(model(SilentNoRollback))
    assert not drafter_follows_the_context(model(SilentNoRollback))


def test_f3_truncate_is_absolute_idempotent_and_loud() -> None:
    sequence = model().open(PROMPT)
    sequence.extend([1, 2, 3])
    sequence.truncate(4)
    sequence.truncate(4)
    assert sequence.length == 4
    for wrong in (5, -1):
        with pytest.raises(EngineError, match="Cannot truncate"):
            sequence.truncate(wrong)


def never_favours_repeats(penalty: constraints.Constraint) -> bool:
    row = np.array([3.0, -3.0, 0.5, -0.5, 1.0], np.float32)
    prefix = np.array([0, 1, 1, 1, 3], np.int32)
    edited = constraints.apply(row, penalty(prefix))
    once = constraints.apply(row, penalty(np.array([0, 1, 3], np.int32)))
    return bool((edited[[0, 1, 3]] < row[[0, 1, 3]]).all()) and np.array_equal(edited, once)


def test_f4_a_penalty_never_makes_a_negative_logit_likelier() -> None:
    def divides_all(prefix: np.ndarray) -> list[constraints.Edit]:
        row = np.array([3.0, -3.0, 0.5, -0.5, 1.0], np.float32)
        return [constraints.Edit("shift", np.array([i]), float(row[i] / 1.5 - row[i])) for i in set(prefix.tolist())]

    assert never_favours_repeats(constraints.repetition_penalty(1.5))
    assert not never_favours_repeats(divides_all)


def ends_every_cycle(ban: constraints.Constraint, size: int) -> bool:
    """A model that loves a cycle cannot go round it with the ban on."""
    for cycle in ([5, 6], [5, 6, 7], [5, 6, 7, 8]):
        row = np.zeros(12, np.float32)
        token_ids = list(cycle) * 4
        row[cycle[0]] = 9
        prefix = np.array(token_ids, np.int32)
        if len(token_ids) >= size and constraints.apply(row, ban(prefix))[cycle[0]] == 9:
            return False
    return True


def test_f5_the_ngram_ban_sees_every_ngram_and_not_just_doubles() -> None:
    def only_doubles(prefix: np.ndarray) -> list[constraints.Edit]:
        return [constraints.Edit("ban", prefix[-1:])]

    assert all(ends_every_cycle(constraints.no_repeat_ngram(size), size) for size in (2, 3, 4))
    assert not ends_every_cycle(only_doubles, 2)


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
    rounds = list(SpeculativeLoop(Context(prompt), drafter, gate, verifier, k, VOCAB).rounds())
    assert sum(len(done.token_ids) for done in rounds) == 32
    return [done.record.reason for done in rounds if done.record.outcome == "verified"]


@pytest.mark.parametrize("cycle", ["员", "员在", "员在的", "员在的一"])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 7])
def test_f6_a_confident_loop_forces_one_escalation_at_any_block_boundary(cycle: str, k: int) -> None:
    class Blind(ThresholdGate):
        """A gate on uncertainty alone."""

        def reason(self, history: History, block: DraftBlock, vocab: Vocab) -> Reason:
            return "uncertain" if self.is_unsure(block.signals) else ""

    assert escalations(cycle, k, ThresholdGate(parse_gate("entropy:2"))) == ["repetition"]
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


def follows_the_definition(sampler: Callable[[np.ndarray, DecodingParams, int], int]) -> bool:
    """One temperature: over many positions the token is argmax(logits / T + noise)."""
    row = np.random.default_rng(1).normal(0, 2, 50).astype(np.float32)
    params = decoding_params(temperature=0.7, seed=3)
    ids = np.arange(50)
    wanted = [int((row.astype(np.float64) / 0.7 + gumbel_noise(3, at, ids)).argmax()) for at in range(300)]
    return [sampler(row, params, at) for at in range(300)] == wanted


def test_f7_temperature_is_applied_once() -> None:
    assert follows_the_definition(sample)
    assert not follows_the_definition(lambda row, params, at: sample(row / np.float32(0.7), params, at))


def test_f7_constraints_see_logits_before_the_temperature() -> None:
    row = np.array([2.0, 1.9, -1.0], np.float32)
    params = decoding_params(temperature=0.5, repetition_penalty=1.2)
    chooser = Chooser(params, VOCAB, 0)
    edited = chooser.constrain(row, np.array([0], np.int32))
    np.testing.assert_allclose(edited, [2.0 / 1.2, 1.9, -1.0], rtol=1e-6)


def incremental_equals_full(engine: Engine) -> bool:
    token_ids = [int(i) for i in np.random.default_rng(2).integers(0, 20, 30)]
    full = engine.open(token_ids[:1]).extend(token_ids)
    steps = engine.open(token_ids[:1])
    return np.array_equal(full, np.concatenate([steps.extend([token_id]) for token_id in token_ids]))


def test_f8_positions_follow_the_sequence_in_incremental_steps() -> None:
    class PositionFromTheFeed(ToyEngine):
        """Counts positions from the start of each feed, as a step without explicit positions does."""

        def forward(self, feeds: list[tuple[Sequence, list[int]]], *, want_logits: bool) -> list[Rows]:  # type: ignore[override]
            before = [[*sequence.token_ids.tolist(), *token_ids] for sequence, token_ids in feeds]
            super().forward(feeds, want_logits=False)
            return [rows_of(written, len(feed)) for written, (_, feed) in zip(before, feeds, strict=True)]

    def rows_of(written: list[int], num_rows: int) -> np.ndarray:
        ends = range(len(written) - num_rows, len(written))
        return np.array([
            LAST[written[end]] + PREVIOUS[written[max(end - 1, 0)]] + POSITION[index % len(POSITION)]
            for index, end in enumerate(ends)
        ])  # fmt: skip

    assert incremental_equals_full(model())
    assert not incremental_equals_full(model(PositionFromTheFeed))
    token_ids = [*PROMPT, *PROMPT]  # as one feed from position 0 it is right, so that nothing but positions is broken
    right, wrong = (model(kind).open(token_ids[:1]).extend(token_ids) for kind in (ToyEngine, PositionFromTheFeed))
    assert np.array_equal(right, wrong)
