"""Fitting: AUROC against scikit-learn, replays against a slow one, and a truth that is known is found again."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

import skydraft
from skydraft.config import DecodingParams
from skydraft.decoding.plan import make_plan
from skydraft.errors import PromptError
from skydraft.evaluation.fitting import (
    LabelledText,
    Replay,
    alone_agreement,
    auroc,
    curve,
    fit,
    fit_weights,
    label_texts,
    labelled,
    table,
    walk,
)
from skydraft.evaluation.scoring import Scorer
from skydraft.gating.calibration import MAX_BLOCK, PairSide, features
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import read_prompt
from skydraft.types import Signals

from ..toys import law
from . import lines, pairs

some = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.5, 0.9]) | st.floats(-5, 5)
positions = st.lists(st.tuples(st.floats(0.001, 0.999), st.booleans()), min_size=1, max_size=60)
limits = st.floats(0, 6)
blocks = st.integers(1, 14)


@law(150)
@given(st.lists(st.tuples(some, st.booleans()), min_size=2, max_size=60))
def test_auroc_is_that_of_scikit_learn(found: list[tuple[float, bool]]) -> None:
    scores, wrong = np.array([score for score, _ in found]), np.array([flag for _, flag in found])
    assume(0 < wrong.sum() < len(wrong))
    assert auroc(scores, wrong) == pytest.approx(roc_auc_score(wrong, scores))


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


def test_a_threshold_on_single_tokens_does_not_add_them_up() -> None:
    sure, wrong = [0.4] * 12, [False] * 12
    assert walk(sure, wrong, 0.5, adds=False).num_calls == 0
    assert walk(sure, wrong, 0.5).num_calls == 4  # two tokens and the bonus, four times
    one = [0.1, 0.6, 0.1, 0.1]
    assert walk(one, [False] * 4, 0.5, adds=False).num_calls == 1


def test_no_block_is_longer_than_the_gate_drafts() -> None:
    found = walk([0.1] * 30, [False] * 30, 0.1 * MAX_BLOCK + 0.05)
    assert found.num_calls == 0
    assert walk([0.1] * 30, [False] * 30, 0.1 * MAX_BLOCK - 0.05).num_calls == 2  # 12 tokens and a bonus each


def test_a_scored_text_is_labelled_by_positions() -> None:
    found = labelled(lines.score(drafted=(1, 9, 4), choices=(1, 2, 4)), "draft")
    assert found.disagrees == (False, True, False)
    assert found.signals == (Signals(0.5, 0.5, 0.75),) * 3
    assert found.agreement == pytest.approx(2 / 3)
    rows, wrong = table([found, found])
    assert rows.shape == (6, 4) and rows[0].tolist() == list(features(Signals(0.5, 0.5, 0.75)))
    assert wrong.tolist() == [False, True, False] * 2


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


def test_prompts_are_labelled_along_what_each_model_writes_alone() -> None:
    (edge, cloud), workload, done = pairs.pair(0.3), pairs.workload(4, 3), []
    texts = label_texts(edge, cloud, workload, 20, lambda: done.append(1))
    assert [text.path for text in texts] == ["target", "draft"] * 3 and len(done) == 3
    params, slow = DecodingParams(max_new_tokens=20), []
    for entry in workload.prompts:
        for path, mode in (("target", "cloud"), ("draft", "edge")):
            alone = skydraft.generate(entry.prompt, edge=edge, cloud=cloud, plan=make_plan(mode), params=params).run()
            scorer = Scorer(edge, cloud, params)
            prompts = read_prompt(edge, asked(entry.prompt))
            slow.append(labelled(scorer.score(entry.id, prompts, alone.token_ids), path))  # type: ignore[arg-type]
            scorer.close()
    assert texts == slow
    agreement, num_tokens = alone_agreement(texts)
    flags = [flag for text in texts[1::2] for flag in text.disagrees]
    assert num_tokens == len(flags) == 60 and agreement == pytest.approx(1 - sum(flags) / 60) and 0.2 < agreement < 1


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
    found = fit(fitted, draft, target, pairs.workload(0, 60), 100)
    about = found.fitted
    assert (about.num_tokens, about.num_prompts, about.max_new_tokens) == (6000, 60, 100)
    assert (about.workload, about.sha256) == ("toys", "0" * 64)
    assert (found.draft, found.target) == tuple(
        PairSide(name=engine.name, fingerprint=engine.fingerprint) for engine in (draft, target)
    )
    assert abs(datetime.now(UTC).date() - date.fromisoformat(about.date)) <= timedelta(days=1)
    assert found.fitted.auroc == pytest.approx(
        roc_auc_score([w for t in fitted for w in t.disagrees], [found.risk(s) for t in fitted for s in t.signals]),
        abs=2e-4,
    )
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
