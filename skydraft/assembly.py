"""The parts of one generation, put together: which rules for which side, which gate, which k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skydraft.config import DEFAULT_K, DecodingParams
from skydraft.decoding.adaptive import AutoK, FixedK, KPolicy
from skydraft.decoding.agreement import CalibratedGate
from skydraft.decoding.calibration import Calibration, check_fits, find_calibration
from skydraft.decoding.choose import Chooser
from skydraft.decoding.context import Context
from skydraft.decoding.drafting import Drafter
from skydraft.decoding.gates import GatePolicy
from skydraft.decoding.loop import SpeculativeLoop
from skydraft.decoding.own_prompt import OtherPrompt, ShiftedVerifier
from skydraft.decoding.plan import Plan
from skydraft.decoding.question import Prompt, Question
from skydraft.decoding.stopping import Stopping
from skydraft.decoding.target import Execution, InProcess, Rules, Target
from skydraft.decoding.verification import Verifier
from skydraft.engines.base import Engine
from skydraft.engines.vocab import Vocab
from skydraft.errors import CloudError, OptionError
from skydraft.models import cache_dir

if TYPE_CHECKING:
    from skydraft.edge.cloud import Cloud


@dataclass(frozen=True, slots=True)
class Sides:
    """Who takes part: the model that drafts, if any, and where verdicts come from, if anywhere.

    `author` is the model here whose context bounds the text; None where that is a server's.
    """

    draft: Engine | None
    target: Target | None
    author: Engine | None
    vocab: Vocab


def target_of(cloud: Engine | Cloud, execution: Execution) -> Target:
    """An engine of this process, or a connection, as what verifies."""
    return InProcess(cloud, execution) if isinstance(cloud, Engine) else cloud


def assemble(
    question: Question,
    sides: Sides,
    plan: Plan,
    params: DecodingParams,
    calibration: Calibration | None,
    *,
    with_signals: bool,
) -> tuple[SpeculativeLoop, Context]:
    """The loop of one generation and the context that it lets grow. Raises UsageError before anything is computed."""
    written = question.target if sides.target else question.edge
    num_new = params.max_new_tokens
    if sides.author:
        sides.author.check_prompt(written.token_ids, written.media)
        num_new = min(num_new, sides.author.context_len - len(written.token_ids))
    # Without a draft model the target's prompt is the only one.
    own = question.edge if sides.draft else written
    rules = _rules(plan, params, sides.vocab, own, num_new)
    gate = _gate(plan, sides.draft, sides.target, calibration)
    context = Context(own.token_ids, own.media)
    drafter = None
    if sides.draft:
        drafter = Drafter(
            sides.draft,
            rules.chooser,
            rules.stopping,
            ends_blocks=gate if plan.eager else None,
            with_signals=with_signals or gate.needs_signals,
        )
    loop = SpeculativeLoop(
        context,
        drafter,
        gate,
        _verifier(context, question.target, sides.target, _rules(plan, params, sides.vocab, written, num_new)),
        FixedK(plan.k) if plan.k is not None else _adaptive_k(plan, sides.draft, sides.target),
        rules.stopping,
        sides.vocab,
        falls_back=bool(sides.target and sides.target.falls_back(plan)),
    )
    return loop, context


def _rules(plan: Plan, params: DecodingParams, vocab: Vocab, prompt: Prompt, num_new: int) -> Rules:
    prompt_len = len(prompt.token_ids)
    chooser = Chooser(params, vocab, prompt_len)
    return Rules(plan, params, vocab, chooser, Stopping(params, vocab, prompt_len, prompt_len + num_new))


def _verifier(context: Context, prompt: Prompt, target: Target | None, rules: Rules) -> Verifier | None:
    """The target's verifier of `context`, which the target may know under a prompt of its own."""
    if target is None:
        return None
    if prompt.media is context.media and prompt.token_ids == tuple(context.token_ids.tolist()):
        return target.verifier(context, rules)
    other = OtherPrompt(context, prompt.token_ids, prompt.media)
    verifier = target.verifier(other, rules)
    return ShiftedVerifier(verifier, other.shift) if other.shift else verifier


def _gate(plan: Plan, draft: Engine | None, target: Target | None, calibration: Calibration | None) -> GatePolicy:
    """The gate of one generation; a calibrated one learns, so that each has its own."""
    if plan.gate.kind != "calibrated":
        if calibration:
            raise OptionError(f"A calibration says nothing to the gate {plan.gate.kind}.")
        return plan.gate
    assert draft and target  # such a plan drafts and verifies
    name, weights = "a target that cannot be asked", None
    try:
        name, weights = target.weights(quick=target.falls_back(plan))
    except CloudError:
        if not target.falls_back(plan):
            raise
    names = f"{draft.name} and {name}"
    if calibration:
        check_fits(calibration, draft.fingerprint, weights, names)
    else:
        calibration = find_calibration([cache_dir() / "calibrations"], draft.fingerprint, weights, names)
    assert plan.k is not None  # make_plan refuses an adaptive k here
    return CalibratedGate(plan.gate, calibration, plan.k)


def _adaptive_k(plan: Plan, draft: Engine | None, target: Target | None) -> KPolicy:
    assert draft and target  # make_plan allows an adaptive k with two models only
    try:
        costs = target.costs(quick=target.falls_back(plan))
    except CloudError:
        if not target.falls_back(plan):
            raise
        return FixedK(DEFAULT_K)  # nothing to weigh yet; the draft model goes on alone
    return AutoK(
        draft.profile,
        costs.profile,
        costs.max_rows,
        # A gate judges drafts, so only where every block is verified anyway may a round draft nothing.
        min_k=0 if plan.gate.kind == "always" else 1,
        max_k=costs.max_block,
        wire_ms=costs.wire_ms or 0.0,
        streams=costs.wire_ms is not None,
    )
