"""Fitting: AUROC against scikit-learn, replays against a slow one, and a truth that is known is found again."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from skydraft.errors import PromptError
from skydraft.gating.calibration import PairSide, features
from skydraft.gating.fitting import (
    LabelledText,
    Replay,
    agreement,
    auroc,
    curve,
    fit,
    fit_weights,
    held_out_risks,
    table,
    walk,
)
from skydraft.gating.hand_back import HandBack, parse_hand_back
from skydraft.learning.calibrating import side_of
from skydraft.types import Signals
from tests.evaluation import pairs
from tests.later import later
from tests.toys import law

metrics = later("sklearn.metrics")

some = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.5, 0.9]) | st.floats(-5, 5)
positions = st.lists(st.tuples(st.floats(0.001, 0.999), st.booleans()), min_size=1, max_size=60)
limits = st.floats(0, 6)
blocks = st.integers(1, 14)
hand_backs = st.sampled_from(["0", "1", "3", "8", "agree:1", "agree:2", "agree:4", "text"]).map(parse_hand_back)
NONE = HandBack()


@law(150)
@given(st.lists(st.tuples(some, st.booleans()), min_size=2, max_size=60))
def test_auroc_is_that_of_scikit_learn(found: list[tuple[float, bool]]) -> None:
    scores, wrong = np.array([score for score, _ in found]), np.array([flag for _, flag in found])
    assume(0 < wrong.sum() < len(wrong))
    assert auroc(scores, wrong) == pytest.approx(metrics.roc_auc_score(wrong, scores))


@pytest.mark.parametrize("flag", [True, False])
def test_auroc_of_one_kind_alone_is_none(flag: bool) -> None:
    assert math.isnan(auroc(np.array([0.1, 0.2]), np.array([flag, flag])))


def replayed(found: list[tuple[float, bool]], limit: float, max_block: int, adds: bool, hand_back: HandBack) -> Replay:
    """Token by token: a block as the gate sees it, what the target makes of it, and what it writes on."""
    left = list(found)
    num_wrong = num_calls = num_drafted = num_written = num_rows = 0
    while left:
        block: list[tuple[float, bool]] = []
        passed = False
        while left[len(block) :] and len(block) < max_block and not passed:
            block.append(left[len(block)])
            risks = [risk for risk, _ in block]
            passed = (sum(risks) if adds else max(risks)) > limit
        num_drafted += len(block)
        flags = [flag for _, flag in block]
        if not passed:
            num_wrong += sum(flags)
            left = left[len(block) :]
            continue
        num_calls += 1
        mended = flags.index(True) + 1 if any(flags) else len(block) + 1
        num_rows += mended
        num_written += mended <= len(left)  # at the end of the text there is no bonus
        left = left[mended:]
        turn: list[bool] = []
        while any(flags) and left and len(turn) < hand_back.num_tokens:
            if 0 < hand_back.agreed <= len(turn) and not any(turn[-hand_back.agreed :]):
                break
            turn.append(left.pop(0)[1])
        num_rows += len(turn)
        num_written += len(turn)
    return Replay(len(found), num_wrong, num_calls, num_drafted, num_written, num_rows)


@law(300)
@given(positions, limits, blocks, st.booleans(), hand_backs)
def test_a_replay_is_the_slow_one(
    found: list[tuple[float, bool]], limit: float, max_block: int, adds: bool, hand_back: HandBack
) -> None:
    risks, flags = [risk for risk, _ in found], [flag for _, flag in found]
    replay = walk(risks, flags, limit, max_block, adds=adds, hand_back=hand_back)
    assert replay == replayed(found, limit, max_block, adds, hand_back)


# Each token is sent alone: 0 where both models agree, 1 where they do not.
@pytest.mark.parametrize(
    ("hand_back", "text", "expected"),
    [
        ("0", "010", Replay(3, 0, 2, 2, 1, 4)),  # accepted, bonus; accepted, and no bonus at the end
        ("0", "1111", Replay(4, 0, 4, 4, 4, 4)),
        ("2", "1111", Replay(4, 0, 2, 2, 4, 4)),  # corrected, two more; corrected
        ("2", "0111", Replay(4, 0, 2, 2, 3, 4)),  # accepted, bonus, and no more; corrected, one more
        ("agree:2", "1001", Replay(4, 0, 2, 2, 4, 4)),
        ("agree:2", "10100", Replay(5, 0, 1, 1, 5, 5)),
        ("agree:1", "10100", Replay(5, 0, 3, 3, 4, 6)),  # corrected, one more; corrected, one more; accepted
        ("text", "0011010", Replay(7, 0, 2, 2, 6, 7)),
    ],
)
def test_replays_by_hand(hand_back: str, text: str, expected: Replay) -> None:
    flags = [flag == "1" for flag in text]
    assert walk([1.0] * len(flags), flags, 0.0, hand_back=parse_hand_back(hand_back)) == expected


@law(100)
@given(positions, limits, blocks, st.booleans(), hand_backs)
def test_tokens_add_up(
    found: list[tuple[float, bool]], limit: float, max_block: int, adds: bool, hand_back: HandBack
) -> None:
    risks, flags = [risk for risk, _ in found], [flag for _, flag in found]
    for ends in (True, False):
        replay = walk(risks, flags, limit, max_block, adds=adds, ends=ends, hand_back=hand_back)
        # Each token is drafted or the target's own; each call throws away less than a block.
        kept = replay.num_tokens - replay.num_written
        assert 0 <= kept <= replay.num_drafted <= kept + replay.num_calls * max_block
        # Each call gives a token of the target's own, save one at the end of the text.
        assert replay.num_written >= replay.num_calls - 1
        # A row judges a draft or gives such a token.
        num_skipped = replay.num_tokens - replay.num_rows
        assert replay.num_wrong - 1 <= num_skipped
    assert walk(risks, flags, math.inf, max_block, adds=adds, hand_back=hand_back) == Replay(
        len(found), sum(flags), 0, len(found)
    )


@law(100)
@given(positions, limits, blocks, st.booleans())
def test_who_writes_to_the_end_corrects_once(
    found: list[tuple[float, bool]], limit: float, max_block: int, adds: bool
) -> None:
    risks, flags = [risk for risk, _ in found], [flag for _, flag in found]
    mine, short = (
        walk(risks, flags, limit, max_block, adds=adds, hand_back=parse_hand_back(name)) for name in ("text", "0")
    )
    always_right = walk(risks, [False] * len(flags), limit, max_block, adds=adds)
    assert mine.num_calls <= min(short.num_calls, always_right.num_calls)
    assert mine.num_wrong <= short.num_wrong and mine.num_written >= short.num_written


@law(100)
@given(positions, limits, blocks, st.booleans(), hand_backs)
def test_no_policy_beats_the_oracle(
    found: list[tuple[float, bool]], limit: float, max_block: int, adds: bool, hand_back: HandBack
) -> None:
    risks, flags = [risk for risk, _ in found], [flag for _, flag in found]
    replay = walk(risks, flags, limit, max_block, adds=adds, hand_back=hand_back)
    agreement, alone = 1 - replay.num_wrong / len(found), 1 - sum(flags) / len(found)
    assert replay.num_written / len(found) >= agreement - alone - 1e-9


@law(50)
@given(positions, blocks, st.booleans(), hand_backs)
def test_the_strictest_limit_leaves_no_disagreement_and_no_limit_makes_no_call(
    found: list[tuple[float, bool]], max_block: int, adds: bool, hand_back: HandBack
) -> None:
    risks, flags = [risk for risk, _ in found], [flag for _, flag in found]
    strict, free = (walk(risks, flags, limit, max_block, adds=adds, hand_back=hand_back) for limit in (0.0, math.inf))
    assert (strict.num_wrong, free.num_calls, free.num_wrong) == (0, 0, sum(flags))


def test_a_table_has_a_row_for_each_position() -> None:
    text = LabelledText("draft", (Signals(0.5, 0.5, 0.75),) * 3, (False, True, False))
    rows, wrong = table([text, text])
    assert rows.shape == (6, 4) and rows[0].tolist() == list(features(Signals(0.5, 0.5, 0.75)))
    assert wrong.tolist() == [False, True, False] * 2
    assert agreement([text, text]) == (pytest.approx(2 / 3), 6)


TRUTH, BIAS = (0.3, 0.5, -1.5, -0.6), 0.2


def simulated(seed: int, num_texts: int, num_tokens: int) -> list[LabelledText]:
    """Texts whose disagreements fall by a known law."""
    rng = np.random.default_rng(seed)
    texts = []
    for number in range(num_texts):
        signals = [Signals(*values) for values in rng.uniform((0, 0, 0.05), (5, 1, 0.99), (num_tokens, 3)).tolist()]
        chances = [risk(TRUTH, BIAS, token) for token in signals]
        wrong = (rng.random(num_tokens) < chances).tolist()
        texts.append(LabelledText("target", tuple(signals), tuple(wrong), str(number)))
    return texts


def risk(weights: tuple[float, ...], bias: float, signals: Signals) -> float:
    return 1 / (1 + math.exp(-(bias + sum(w * x for w, x in zip(weights, features(signals), strict=True)))))


def test_a_known_law_is_found_again() -> None:
    weights, bias = fit_weights(simulated(0, 60, 500))
    assert weights == pytest.approx(TRUTH, abs=0.15)
    assert bias == pytest.approx(BIAS, abs=0.25)
    fresh = [token for text in simulated(1, 2, 500) for token in text.signals]
    errors = [abs(risk(weights, bias, token) - risk(TRUTH, BIAS, token)) for token in fresh]
    assert np.mean(errors) < 0.02


def test_a_curve_keeps_on_fresh_texts_what_it_promised() -> None:
    fitted, fresh = simulated(2, 60, 100), simulated(3, 60, 100)
    draft, target = pairs.pair(0.1)
    found = fit(fitted, side_of(draft), side_of(target), "toys", 100, sha256="0" * 64)
    about = found.fitted
    assert (about.num_tokens, about.num_prompts, about.max_new_tokens) == (6000, 60, 100)
    assert (about.workload, about.sha256) == ("toys", "0" * 64)
    assert (found.draft, found.target) == tuple(
        PairSide(name=engine.name, fingerprint=engine.fingerprint) for engine in (draft, target)
    )
    assert abs(datetime.now(UTC).date() - date.fromisoformat(about.date)) <= timedelta(days=1)
    wrong, risks = [w for t in fitted for w in t.disagrees], [found.risk(s) for t in fitted for s in t.signals]
    assert about.auroc == pytest.approx(metrics.roc_auc_score(wrong, risks), abs=2e-4)
    for wanted in (0.8, 0.9, 0.95):
        walked = [walk([found.risk(s) for s in t.signals], t.disagrees, found.limit(wanted, 12, NONE)) for t in fresh]
        assert 1 - sum(replay.num_wrong for replay in walked) / 6000 == pytest.approx(wanted, abs=0.03)


@pytest.mark.parametrize("hand_back", ["0", "agree:2", "8", "text"])
def test_a_curve_runs_from_all_to_nothing_and_says_what_each_limit_takes(hand_back: str) -> None:
    texts = simulated(4, 20, 50)
    risks = [[risk(TRUTH, BIAS, token) for token in text.signals] for text in texts]
    found = curve(texts, risks, 12, parse_hand_back(hand_back))
    points = found.points
    assert (found.k, found.hand_back) == (12, hand_back)
    assert (points[0].limit, points[0].agreement) == (0, 1)
    assert points[-1].calls_per_token == points[-1].written_per_token == points[-1].rows_per_token == 0
    assert points[-1].agreement == pytest.approx(1 - sum(sum(text.disagrees) for text in texts) / 1000, abs=1e-5)
    assert all(one.limit < two.limit and one.agreement >= two.agreement for one, two in pairwise(points))
    assert all(one.agreement > two.agreement for one, two in pairwise(points[1:]))
    for point in points:
        walked = [
            walk(along, text.disagrees, point.limit, 12, hand_back=parse_hand_back(hand_back))
            for text, along in zip(texts, risks, strict=True)
        ]
        for name in ("calls", "written", "rows", "drafted"):
            taken = sum(getattr(replay, f"num_{name}") for replay in walked) / 1000
            assert getattr(point, f"{name}_per_token") == pytest.approx(taken, abs=0.01)  # the limit is rounded
        assert point.agreement <= 1 - sum(replay.num_wrong for replay in walked) / 1000 + 0.002


def test_what_the_target_writes_on_spares_calls_and_lets_the_limit_be_looser() -> None:
    draft, target = pairs.pair(0.1)
    found = fit(simulated(5, 40, 80), side_of(draft), side_of(target), "toys", 80)
    assert found.hand_backs == ("0", "agree:2", "agree:4", "agree:6", "8", "text")
    for k in (4, 6, 8, 12):
        calls, limits = [], []
        for name in ("0", "agree:2", "agree:4", "agree:6"):
            points = found.curve(k, parse_hand_back(name)).points
            calls.append(min(point.calls_per_token for point in points if point.agreement >= 0.9))
            limits.append(found.limit(0.9, k, parse_hand_back(name)))
        assert calls == sorted(calls, reverse=True) and limits == sorted(limits)


def both_paths(seed: int, num_prompts: int) -> list[LabelledText]:
    """Texts along both paths of some prompts."""
    drafts = [replace(text, path="draft") for text in simulated(seed + 1, num_prompts, 40)]
    return [text for both in zip(simulated(seed, num_prompts, 40), drafts, strict=True) for text in both]


def test_the_risks_of_a_prompt_are_learned_from_others() -> None:
    texts = both_paths(6, 15)
    risks = held_out_risks(texts)
    assert [len(each) for each in risks] == [40] * 30
    for path in (0, 1):
        changed = list(texts)
        changed[6 + path] = replace(texts[6 + path], disagrees=tuple(not flag for flag in texts[6 + path].disagrees))
        again = held_out_risks(changed)
        same = [old == new for old, new in zip(risks, again, strict=True)]
        assert same[6] and same[7] and not all(same)


def test_limits_come_from_risks_that_were_learned_from_others() -> None:
    texts, sides = both_paths(8, 15), (PairSide(name="a", fingerprint="0"), PairSide(name="b", fingerprint="1"))
    found, (weights, bias) = fit(texts, *sides, "two", 40), fit_weights(texts)
    assert found.weights == pytest.approx(weights, abs=1e-5) and found.bias == pytest.approx(bias, abs=1e-5)
    assert found.curve(12, NONE) == curve(texts[::2], held_out_risks(texts)[::2], 12)
    alone = [replace(text, prompt="") for text in texts]  # one prompt leaves nothing to learn from
    same = [[found.risk(token) for token in text.signals] for text in texts[::2]]
    assert fit(alone, *sides, "one", 40).curve(12, NONE) == curve(texts[::2], same, 12)


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ([], "0 tokens with 0 disagreements"),
        (simulated(0, 1, 199), "199 tokens"),
        ([LabelledText("draft", (Signals(1.0, 0.5, 0.6),) * 300, (False,) * 300)], "300 tokens with 0 disagreements"),
        ([LabelledText("draft", (Signals(1.0, 0.5, 0.6),) * 300, (True,) * 300)], "300 tokens with 300 disagreements"),
    ],
)
def test_too_little_to_fit_says_how_much_there_was(texts: list[LabelledText], says: str) -> None:
    with pytest.raises(PromptError, match=says):
        fit_weights(texts)


def test_limits_come_from_what_was_not_trained_on() -> None:
    sure, unsure = Signals(0.1, 0.9, 0.95), Signals(3.0, 0.1, 0.3)
    known = [LabelledText("target", (sure, unsure) * 20, (False,) * 37 + (True,) * 3) for _ in range(10)]
    unseen = [LabelledText("target", (sure, unsure) * 20, (False, True) * 20) for _ in range(10)]
    sides = PairSide(name="a", fingerprint="0"), PairSide(name="b", fingerprint="1")
    with pytest.raises(PromptError, match="3 tokens with 0 disagreements are too few"):
        fit(known, *sides, "one", 40, unseen=[LabelledText("target", (sure,) * 3, (False,) * 3)])
    with pytest.raises(PromptError, match="0 tokens"):
        fit(known, *sides, "one", 40, unseen=[])
    for texts in (known, unseen):
        found = fit(known, *sides, "one", 40, unseen=texts)
        assert found.curves[-1].points[-1].agreement == pytest.approx(agreement(texts)[0], abs=0.002)
    assert found.curves[-1].points[0].agreement == 1  # where all is asked, nothing is left to chance


def test_fewer_texts_that_were_not_trained_on_ask_more_often() -> None:
    sure, unsure = Signals(0.1, 0.9, 0.95), Signals(3.0, 0.1, 0.3)
    wrong = [(False,) * 38 + (True, False), (False,) * 20 + (True,) * 4 + (False,) * 16, (False,) * 40]
    texts = [LabelledText("target", (sure, sure, unsure, sure) * 10, flags) for flags in wrong]
    sides = PairSide(name="a", fingerprint="0"), PairSide(name="b", fingerprint="1")
    limits = [fit(texts * 20, *sides, "one", 40, unseen=texts * times).limit(0.95, 12, NONE) for times in (1, 3, 30)]
    assert limits == sorted(limits) and limits[0] < limits[-1]
