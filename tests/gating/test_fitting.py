"""Fitting: replays against a slow one, and limits that keep what they promised."""

import math
from datetime import UTC, date, datetime, timedelta
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.errors import PromptError
from skydraft.gating.allowance import Allowance
from skydraft.gating.calibration import Calibration, PairSide, risks_of
from skydraft.gating.fitting import LabelledText, Replay, agreement, count_risks, curve, fit, walk
from skydraft.gating.hand_back import HandBack, parse_hand_back
from skydraft.types import Signals
from tests.toys import law

positions = st.lists(st.tuples(st.floats(0.001, 0.999), st.booleans()), min_size=1, max_size=60)
limits = st.floats(0, 6)
blocks = st.integers(1, 14)
hand_backs = st.sampled_from(["0", "1", "3", "8", "agree:1", "agree:2", "agree:4", "text"]).map(parse_hand_back)
SIDES = PairSide(name="a", fingerprint="0"), PairSide(name="b", fingerprint="1")
NONE = HandBack()


def replayed(found: list[tuple[float, bool]], limit: float, max_block: int, hand_back: HandBack) -> Replay:
    """Token by token: a block as the gate sees it, what the target makes of it, and what it writes on."""
    at = num_wrong = num_calls = num_written = 0
    while at < len(found):
        sums = list(accumulate(risk for risk, _ in found[at : at + max_block]))
        num = next((num for num, total in enumerate(sums, 1) if total > limit), len(sums))
        flags = [flag for _, flag in found[at : at + num]]
        if sums[num - 1] <= limit:
            num_wrong, at = num_wrong + sum(flags), at + num
            continue
        mended = flags.index(True) + 1 if any(flags) else num + 1
        num_calls, num_written = num_calls + 1, num_written + (at + mended <= len(found))  # no bonus after the end
        at, num_agreed = at + mended, 0
        for _ in range(hand_back.num_tokens if any(flags) else 0):
            if at >= len(found) or num_agreed == hand_back.agreed > 0:
                break
            num_agreed = 0 if found[at][1] else num_agreed + 1
            at, num_written = at + 1, num_written + 1
    return Replay(len(found), num_wrong, num_calls, num_written)


@law(300)
@given(positions, limits, blocks, hand_backs)
def test_a_replay_is_exact(found: list[tuple[float, bool]], limit: float, max_block: int, hand_back: HandBack) -> None:
    """A replay is the slow one, and no better than an oracle."""
    risks, flags = [risk for risk, _ in found], [flag for _, flag in found]
    replay = walk(risks, flags, limit, max_block, hand_back)
    assert replay == replayed(found, limit, max_block, hand_back)
    assert replay.num_written >= sum(flags) - replay.num_wrong  # an oracle writes just these
    strict, free = (walk(risks, flags, most, max_block, hand_back) for most in (0.0, math.inf))
    assert strict.num_wrong == 0
    assert free == Replay(len(found), sum(flags), 0, 0)


def written(tops: Any, wrong: Any) -> LabelledText:
    """A text whose tokens have these top probabilities, some of them wrong."""
    signals = tuple(Signals(1.0, 0.5, top) for top in tops.tolist())
    return LabelledText("target", signals, tuple(wrong.tolist()))


def simulated(seed: int, num_texts: int, num_tokens: int, harder: float = 1.0) -> list[LabelledText]:
    """Texts whose disagreements fall by a law that is not that of the gate: the draft model is too modest."""
    rng = np.random.default_rng(seed)
    tops = (rng.uniform(0.05, 1, num_tokens) ** 0.3 for _ in range(num_texts))
    return [written(each, rng.random(num_tokens) < 0.8 * harder * (1 - each)) for each in tops]


def test_a_calibration_keeps_on_fresh_texts_what_it_promised() -> None:
    fitted, fresh = simulated(2, 60, 100), simulated(3, 60, 100)
    found = fit(fitted, *SIDES, "toys", 100, sha256="0" * 64)
    about = {"num_tokens": 6000, "num_prompts": 60, "max_new_tokens": 100, "workload": "toys", "sha256": "0" * 64}
    assert about.items() <= found.fitted.items() and (found.draft, found.target) == SIDES
    assert abs(datetime.now(UTC).date() - date.fromisoformat(str(found.fitted["date"]))) <= timedelta(days=1)
    for low, high, found_risk in ((0.5, 0.65, found.risks[3]), (0.8, 0.9, found.risks[5]), (0.99, 1, found.risks[8])):
        assert found_risk == pytest.approx(0.8 * (1 - (low + high) / 2), abs=0.03)
    for wanted in (0.9, 0.95, 0.98):
        limit = found.limit(wanted, 12, NONE)
        walked = [walk([found.risk([s]) for s in t.signals], t.disagrees, limit) for t in fresh]
        assert 1 - sum(replay.num_wrong for replay in walked) / 6000 == pytest.approx(wanted, abs=0.012)


@pytest.mark.parametrize("hand_back", ["0", "agree:2", "8", "text"])
def test_a_curve_runs_from_all_to_nothing_and_says_what_each_limit_takes(hand_back: str) -> None:
    texts = simulated(4, 20, 50)
    risks = count_risks(texts)
    found = curve(texts, risks, 12, parse_hand_back(hand_back))
    points = found.points
    assert (found.k, found.hand_back) == (12, hand_back)
    assert (points[0].limit, points[0].agreement) == (0, 1)
    assert points[-1].calls_per_token == points[-1].written_per_token == 0
    assert points[-1].agreement == pytest.approx(agreement(texts)[0], abs=1e-5)
    assert all(one.limit < two.limit for one, two in pairwise(points))
    assert all(one.agreement > two.agreement for one, two in pairwise(points[1:]))
    for point in points:
        walked = [
            walk(risks_of(risks, text.signals), text.disagrees, point.limit, 12, parse_hand_back(hand_back))
            for text in texts
        ]
        for name in ("calls", "written"):
            taken = sum(getattr(replay, f"num_{name}") for replay in walked) / 1000
            assert getattr(point, f"{name}_per_token") == pytest.approx(taken, abs=0.01)  # the limit is rounded
        assert point.agreement <= 1 - sum(replay.num_wrong for replay in walked) / 1000 + 0.002


SURE, UNSURE = Signals(0.1, 0.9, 0.95), Signals(3.0, 0.1, 0.3)


@pytest.mark.parametrize("flags", [(), (False, True) * 49, (False,) * 300, (True,) * 300], ids=len)
def test_too_little_to_fit_says_how_much_there_was(flags: tuple[bool, ...]) -> None:
    enough, little = simulated(0, 3, 100), [LabelledText("target", (SURE,) * len(flags), flags)]
    with pytest.raises(PromptError, match=f"{len(flags)} tokens with {sum(flags)} disagreements are too few"):
        fit(little, *SIDES, "one", 40)
    if flags == (False,) * 300:  # what was learned whole leaves none, and is trusted as far as so many tokens tell
        learned = fit(enough, *SIDES, "one", 40, unseen=little * 6).curve(6, HandBack())
        assert learned.limit(0.95) == learned.points[-1].limit and learned.points[-1].agreement < 1
    with pytest.raises(PromptError, match="answers that the draft model was not trained on"):
        fit(enough, *SIDES, "one", 40, unseen=little)


def gated(found: Calibration, asked: float, limit: float, texts: list[LabelledText]) -> float:
    """The share of tokens without a disagreement, in blocks of six that the gate sends or leaves."""
    num_wrong = num_tokens = 0
    for text in texts:
        allowance = Allowance(found, asked, limit)
        for base in range(0, len(text.signals), 6):
            block = text.signals[base : base + 6]
            is_sent = allowance.is_unsure(block)
            num_wrong += 0 if is_sent else sum(text.disagrees[base : base + 6])
            num_tokens += len(block)
            allowance.observe(len(block), () if is_sent else block)
    return 1 - num_wrong / num_tokens


def test_a_gate_over_what_was_learned_keeps_on_fresh_texts_what_was_asked() -> None:
    """Though the draft model is right far more often where it was trained, the expected disagreements are not fewer."""
    learned, unseen, fresh = simulated(5, 100, 100, harder=0.25), simulated(6, 20, 100), simulated(7, 60, 100)
    found = fit([*learned, *unseen], *SIDES, "one", 100, unseen=unseen)
    for asked in (0.9, 0.95):
        assert asked - 0.01 < gated(found, asked, found.limit(asked, 6, NONE), fresh) < asked + 0.05


def test_fewer_texts_that_were_not_trained_on_ask_more_often() -> None:
    wrong = [(False,) * 38 + (True, False), (False,) * 20 + (True,) * 4 + (False,) * 16, (False,) * 40]
    texts = [LabelledText("target", (SURE, SURE, UNSURE, SURE) * 10, flags) for flags in wrong]
    risks = count_risks(texts * 10)
    curves = [curve(texts * times, risks, 12, is_cautious=True) for times in (2, 3, 10)]
    limits = [each.limit(0.95) or 0.0 for each in curves]
    assert limits == sorted(limits) and limits[0] < limits[-1]
    for times in (5, 20):  # and more disagreements are expected than there were
        made, measured = fit(texts, *SIDES, "one", 40, unseen=texts * times), count_risks(texts * times)
        more = [mine / theirs for mine, theirs in zip(made.risks, measured, strict=True) if theirs > 1e-4]
        assert min(more) == pytest.approx(max(more), abs=0.01) and 1.05 < min(more) < 1 + 1.5 / math.sqrt(times)
