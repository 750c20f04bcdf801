"""Fitting: AUROC against scikit-learn, replays against a slow one, and a truth that is known is found again."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from skydraft.errors import PromptError
from skydraft.gating.calibration import PairSide, features
from skydraft.gating.fitting import LabelledText, Replay, agreement, auroc, curve, fit, fit_weights, table, walk
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


@law(150)
@given(st.lists(st.tuples(some, st.booleans()), min_size=2, max_size=60))
def test_auroc_is_that_of_scikit_learn(found: list[tuple[float, bool]]) -> None:
    scores, wrong = np.array([score for score, _ in found]), np.array([flag for _, flag in found])
    assume(0 < wrong.sum() < len(wrong))
    assert auroc(scores, wrong) == pytest.approx(metrics.roc_auc_score(wrong, scores))


@pytest.mark.parametrize("flag", [True, False])
def test_auroc_of_one_kind_alone_is_none(flag: bool) -> None:
    assert math.isnan(auroc(np.array([0.1, 0.2]), np.array([flag, flag])))


def replayed(found: list[tuple[float, bool]], limit: float, max_block: int, adds: bool) -> tuple[int, int]:
    """(disagreements left, calls), token by token: a block as the gate sees it, then what the target makes of it."""
    left = list(found)
    num_wrong = num_calls = 0
    while left:
        block: list[tuple[float, bool]] = []
        passed = False
        while left[len(block) :] and len(block) < max_block and not passed:
            block.append(left[len(block)])
            risks = [risk for risk, _ in block]
            passed = (sum(risks) if adds else max(risks)) > limit
        flags = [flag for _, flag in block]
        if not passed:
            num_wrong += sum(flags)
            left = left[len(block) :]
        else:
            num_calls += 1
            mended = flags.index(True) + 1 if any(flags) else len(block) + 1
            left = left[mended:]
    return num_wrong, num_calls


@law(150)
@given(positions, limits, blocks, st.booleans())
def test_a_replay_is_the_slow_one(found: list[tuple[float, bool]], limit: float, max_block: int, adds: bool) -> None:
    risks, flags = [risk for risk, _ in found], [flag for _, flag in found]
    replay = walk(risks, flags, limit, max_block, adds=adds)
    assert (replay.num_wrong, replay.num_calls) == replayed(found, limit, max_block, adds)
    assert replay.num_tokens == len(found)


@law(100)
@given(positions, limits, blocks, st.booleans())
def test_what_is_drafted_is_at_most_a_block_for_each_call_and_skip(
    found: list[tuple[float, bool]], limit: float, max_block: int, adds: bool
) -> None:
    risks, flags = [risk for risk, _ in found], [flag for _, flag in found]
    ended, whole = (walk(risks, flags, limit, max_block, adds=adds, ends=ends) for ends in (True, False))
    for replay in (ended, whole):
        # Each token is drafted or the target's own; each call throws away less than a block.
        assert replay.num_tokens - replay.num_calls <= replay.num_drafted
        assert replay.num_drafted <= replay.num_tokens + replay.num_calls * (max_block - 1)
    assert walk(risks, flags, math.inf, max_block, adds=adds) == Replay(len(found), sum(flags), 0, len(found))


@law(100)
@given(positions, limits, blocks, st.booleans())
def test_no_policy_beats_the_oracle(found: list[tuple[float, bool]], limit: float, max_block: int, adds: bool) -> None:
    risks, flags = [risk for risk, _ in found], [flag for _, flag in found]
    replay = walk(risks, flags, limit, max_block, adds=adds)
    agreement, alone = 1 - replay.num_wrong / len(found), 1 - sum(flags) / len(found)
    assert replay.num_calls / len(found) >= agreement - alone - 1e-9


@law(50)
@given(positions, blocks, st.booleans())
def test_the_strictest_limit_leaves_no_disagreement_and_no_limit_makes_no_call(
    found: list[tuple[float, bool]], max_block: int, adds: bool
) -> None:
    risks, flags = [risk for risk, _ in found], [flag for _, flag in found]
    strict, free = (walk(risks, flags, limit, max_block, adds=adds) for limit in (0.0, math.inf))
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
    for _ in range(num_texts):
        signals = [Signals(*values) for values in rng.uniform((0, 0, 0.05), (5, 1, 0.99), (num_tokens, 3)).tolist()]
        chances = [risk(TRUTH, BIAS, token) for token in signals]
        wrong = (rng.random(num_tokens) < chances).tolist()
        texts.append(LabelledText("target", tuple(signals), tuple(wrong)))
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
        walked = [walk([found.risk(s) for s in t.signals], t.disagrees, found.limit(wanted, 12)) for t in fresh]
        assert 1 - sum(replay.num_wrong for replay in walked) / 6000 == pytest.approx(wanted, abs=0.03)


def test_a_curve_runs_from_all_to_nothing() -> None:
    texts = simulated(4, 20, 50)
    risks = [[risk(TRUTH, BIAS, token) for token in text.signals] for text in texts]
    points = curve(texts, risks, 12).points
    assert (points[0].limit, points[0].agreement) == (0, 1)
    assert points[-1].calls_per_token == 0
    assert points[-1].agreement == pytest.approx(1 - sum(sum(text.disagrees) for text in texts) / 1000, abs=1e-5)
    assert all(one.limit < two.limit and one.agreement >= two.agreement for one, two in pairwise(points))


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
    limits = [fit(texts * 20, *sides, "one", 40, unseen=texts * times).limit(0.95, 12) for times in (1, 3, 30)]
    assert limits == sorted(limits) and limits[0] < limits[-1]
