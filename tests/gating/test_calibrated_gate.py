"""The calibrated gate: risks add up, and a text keeps the agreement that was asked for."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.decoding.context import Context
from skydraft.decoding.drafting import Drafter
from skydraft.engines.base import Engine
from skydraft.engines.toy import ToyEngine, character_vocab
from skydraft.evaluation.scoring import Scorer
from skydraft.gating.calibration import (
    FEATURES,
    MAX_BLOCK,
    CalibratedGate,
    Calibration,
    Curve,
    CurvePoint,
    Fitted,
    PairSide,
)
from skydraft.gating.gates import parse_gate
from skydraft.gating.hand_back import HandBack
from skydraft.prompts.messages import asked as asked_for
from skydraft.prompts.pair import read_prompt
from skydraft.types import DraftBlock, Prompt, Signals

from .. import reference, toys
from ..evaluation import pairs
from ..toys import PROMPT, PROMPT_IDS, law

CHARACTERS = character_vocab("我你他员在说高兴人，。！？12345")


def side(engine: Engine | None = None) -> PairSide:
    return PairSide(name="toy", fingerprint=engine.fingerprint if engine else "0")


def calibration(draft: Engine | None = None, target: Engine | None = None) -> Calibration:
    """The risk of a token is 1 − top probability; the limit for an agreement A is 2 × (1 − A)."""
    return Calibration(
        draft=side(draft),
        target=side(target),
        features=FEATURES,
        weights=(0.0, 0.0, 0.0, -1.0),
        bias=0.0,
        curves=(Curve(k=1, points=(
            CurvePoint(limit=0, agreement=1, calls_per_token=0.5),
            CurvePoint(limit=2, agreement=0, calls_per_token=0),
        )),),
        fitted=Fitted(
            workload="", sha256="", num_prompts=1, num_tokens=1, date="", max_new_tokens=1, auroc=0.5
        ),
    )  # fmt: skip


def gate(agreement: float, rules: str = "") -> CalibratedGate:
    return CalibratedGate(parse_gate(f"calibrated:{agreement}{rules}"), calibration(), 5, HandBack())


def token(risk: float) -> Signals:
    return Signals(1.0, 0.5, 1 - risk)


def block(*risks: float) -> DraftBlock:
    return DraftBlock(0, (0,) * len(risks), tuple(map(token, risks)))


risks = st.lists(st.floats(0.001, 0.999), min_size=1, max_size=12)
agreements = st.floats(0.05, 0.99)


@law(100)
@given(risks, agreements)
def test_the_risk_of_a_block_is_the_sum_over_its_tokens(found: list[float], agreement: float) -> None:
    limit = 2 * (1 - agreement)
    assume(abs(sum(found) - limit) > 1e-5)
    assert gate(agreement).is_unsure([token(risk) for risk in found]) == (sum(found) > limit)


@law(50)
@given(toys.pairs(), agreements, st.integers(1, 12))
def test_an_eager_block_ends_right_after_the_token_whose_running_sum_passes(
    pair: tuple[ToyEngine, ToyEngine], agreement: float, k: int
) -> None:
    drafter = Drafter(pair[0], toys.ASKED, DecodingParams(), 64, ends_blocks=gate(agreement).is_unsure)
    drafted = drafter.draft(Context(toys.ASKED), k)
    sums = list(accumulate(1 - signals.top_prob for signals in drafted.signals))
    passed = [total > 2 * (1 - agreement) for total in sums]
    assert not any(passed[:-1])
    assert passed[-1] == (drafted.ended_by == "gate") or drafted.ended_by == "stop"
    assert len(drafted.token_ids) == k or drafted.ended_by != "k"


@pytest.mark.parametrize(
    ("rules", "history", "text", "expected"),
    [
        ("", "", "我在说高", ""),
        ("", "", "我，。", "density"),
        ("", "员在员", "在我", "repetition"),
        ("", "", "我有3", ""),
        ("+digits", "", "我在3", "content"),
    ],
)
def test_rules_about_text_hold_however_sure_the_draft_is(rules: str, history: str, text: str, expected: str) -> None:
    context = Context(Prompt(CHARACTERS.encode("我你")))
    assert gate(0.5, rules).reason(context, DraftBlock(0, ()), CHARACTERS) == "always"
    context.commit_skip(DraftBlock(0, CHARACTERS.encode(history)), None)
    token_ids = CHARACTERS.encode(text)
    for risk, says in ((0.001, expected), (0.9, "uncertain")):
        drafted = DraftBlock(context.base, token_ids, (token(risk),) * len(token_ids))
        assert gate(0.5, rules).reason(context, drafted, CHARACTERS) == says


def start(pair: tuple[Engine, Engine], agreement: float, k: int, eager: bool, params: DecodingParams) -> Generation:
    plan = make_plan(gate=f"calibrated:{agreement}", k=k, eager=eager)
    found = calibration(*pair)
    return skydraft.generate(PROMPT, edge=pair[0], cloud=pair[1], plan=plan, params=params, raw=True, calibration=found)


@law(40)
@given(toys.pairs(), toys.params(), agreements, st.integers(1, 8), st.booleans())
def test_a_calibrated_run_is_repeatable_and_says_truly_who_wrote_what(
    pair: tuple[ToyEngine, ToyEngine], params: DecodingParams, agreement: float, k: int, eager: bool
) -> None:
    first, again = (start(pair, agreement, k, eager, params).run() for _ in range(2))
    assert first.origins == again.origins and first.finish_reason == again.finish_reason
    assert [record.reason for record in first.records] == [record.reason for record in again.records]
    assert first.token_ids == again.token_ids
    prefix = list(PROMPT_IDS)
    for token_id, origin in zip(first.token_ids, first.origins, strict=True):
        model = pair[0] if origin == "skipped" else pair[1]
        assert token_id == reference.next_token(model, prefix, len(PROMPT_IDS), params)
        prefix.append(token_id)


@law(30)
@given(toys.pairs(), agreements, st.integers(1, 8))
def test_every_decision_of_a_run_follows_from_its_block(
    pair: tuple[ToyEngine, ToyEngine], agreement: float, k: int
) -> None:
    generation = start(pair, agreement, k, False, DecodingParams(max_new_tokens=40, min_new_tokens=40))
    for done, _ in generation.rounds():
        risk = sum(1 / (1 + math.exp(math.log(s.top_prob / (1 - s.top_prob)))) if s.top_prob < 1 else 0.0
                   for s in done.block.signals)  # fmt: skip
        expected = "uncertain" if risk > 2 * (1 - agreement) else ""
        assert done.record.reason == expected or (done.record.reason in ("density", "repetition") and not expected)


def achieved(drift: float, agreement: float, k: int = MAX_BLOCK) -> tuple[float, float]:
    """(agreement by scoring the texts, calls per token) over prompts that the calibration was not fitted on."""
    edge, cloud = pairs.pair(drift)
    params = DecodingParams(max_new_tokens=pairs.NUM_TOKENS)
    plan = make_plan(gate=f"calibrated:{agreement}", k=k, eager=True)
    scorer = Scorer(edge, cloud, params)
    agreed = calls = total = 0
    for prompt in pairs.prompts(1):
        done = skydraft.generate(
            prompt, edge=edge, cloud=cloud, plan=plan, params=params, calibration=pairs.calibration(drift)
        ).run()
        line = scorer.score(prompt, read_prompt(cloud, asked_for(prompt)), done.token_ids)
        agreed += sum(mine == theirs for mine, theirs in zip(line.token_ids, line.choices, strict=True))
        calls += done.stats.num_escalated
        total += len(done.token_ids)
    scorer.close()
    return agreed / total, calls / total


@pytest.mark.parametrize(("drift", "asked"), [(0.1, (0.86, 0.9, 0.95, 0.98)), (0.2, (0.75, 0.85, 0.9, 0.95))])
def test_the_agreement_asked_for_is_kept_and_less_takes_fewer_calls(drift: float, asked: tuple[float, ...]) -> None:
    found = [achieved(drift, agreement) for agreement in asked]
    for wanted, (agreement, _) in zip(asked, found, strict=True):
        assert abs(agreement - wanted) < 0.05
    assert all(fewer < more for (_, fewer), (_, more) in pairwise(found))
    assert all(lower < higher for (lower, _), (higher, _) in pairwise(found))


@pytest.mark.parametrize("k", [5, 8, 32])
def test_the_agreement_asked_for_is_kept_whatever_the_block_length(k: int) -> None:
    assert abs(achieved(0.2, 0.9, k)[0] - 0.9) < 0.07
