"""A generation put together, from what was asked and who takes part."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from pathlib import Path

from skydraft.config import DEFAULT_K, MAX_K, DecodingParams
from skydraft.decoding.block_length import AutoK, BlockLength
from skydraft.decoding.context import Context
from skydraft.decoding.cost_model import CostModel
from skydraft.decoding.drafting import Drafter
from skydraft.decoding.generation import Generation, TextStream
from skydraft.decoding.loop import SpeculativeLoop
from skydraft.decoding.plan import Plan
from skydraft.decoding.preparing import Preparer
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.target import Target, TargetCosts
from skydraft.engines.base import Engine
from skydraft.engines.vocab import check_same
from skydraft.errors import CloudError, CloudLost, OptionError, RecordsError
from skydraft.gating.calibrated_gate import CalibratedGate
from skydraft.gating.calibration import MAX_BLOCK, Calibration, check_fits, find_calibration
from skydraft.gating.gates import Gate, ThresholdGate
from skydraft.gating.risk import CalibratedRisk, LearnedRisk, Risk
from skydraft.prompts.pair import read_prompt
from skydraft.types import Signals


def start_generation(
    request: GenerateRequest, edge: Engine | None, target: Target | None, calibrations: Iterable[Path] = ()
) -> Generation:
    """Begin one. `edge` drafts, or reads the prompt for a target elsewhere; a plan uses those of both that it needs.

    Calibrations are looked for in the folders `calibrations` and among those that come with the package. Raises
    UsageError before anything is computed.
    """
    plan, params = request.plan, request.params
    draft, verifying = (edge if plan.drafts else None), (target if plan.verifies else None)
    local = verifying.engine if verifying else None
    if plan.verifies and not verifying:
        raise _missing("cloud")
    reader = draft or local or edge
    if reader is None or (plan.drafts and not draft):
        raise _missing("edge")
    if draft and local:
        check_same(draft.vocab, local.vocab)
    vocab = (local or reader).vocab  # so that the text of a target here is the same whoever drafts for it
    prompts = read_prompt(reader, request.messages, raw=request.raw, share=request.share_audio, tools=request.tools)
    # Whose text it is sets the limit; a draft model with a shorter context stops drafting there.
    read, author = (prompts.target, local) if verifying else (prompts.edge, draft)
    max_new_tokens = params.max_new_tokens
    if author:
        max_new_tokens = min(max_new_tokens, author.room(read.token_ids, read.media))
    gate = _gate(plan, draft, verifying, request.calibration, calibrations)
    context = Context(prompts.edge if draft else prompts.target)
    with_signals = request.with_signals or plan.gate.needs_signals or plan.k is None
    costs = _costs(plan, draft, verifying)
    risk = _risk(draft, costs, calibrations)
    k = plan.k if plan.k is not None else _adaptive_k(plan, draft, costs, risk, len(prompts.edge.token_ids))
    ends_blocks = _end_of_blocks(plan, gate, k)
    drafter = verifier = preparer = None
    works_ahead = bool(verifying and verifying.works_ahead)
    if draft:
        drafter = Drafter(
            draft, prompts.edge, params, max_new_tokens, ends_blocks=ends_blocks, with_signals=with_signals,
            longest=_longest(plan, params, verifying), reuse=request.reuse,
            prepares=works_ahead,
        )  # fmt: skip
        preparer = Preparer(drafter, risk, k) if works_ahead else None
    if verifying:
        drafts_first = isinstance(k, int) or k.longest() > 0
        verifier = verifying.verifier(
            context, prompts.target, vocab, plan, params, request.cache_scope,
            drafts_first=drafts_first, traceparent=request.traceparent,
        )  # fmt: skip
    falls_back = bool(verifying and verifying.falls_back(plan))
    loop = SpeculativeLoop(context, drafter, gate, verifier, k, vocab, falls_back=falls_back, preparer=preparer)
    return Generation(loop, context, TextStream(vocab, params.stop), prompts, request)


def _gate(
    plan: Plan, draft: Engine | None, target: Target | None, given: Calibration | None, folders: Iterable[Path]
) -> Gate:
    """The gate of one generation; a calibrated one learns, so that each has its own."""
    if plan.gate.kind != "calibrated":
        return ThresholdGate(plan.gate)
    if draft is None or target is None:
        raise OptionError("A calibrated gate needs a draft model and a target.")
    name, weights = "a target that cannot be reached", None
    try:
        name, weights = target.weights(quick=target.falls_back(plan))
    except CloudError:
        if not target.falls_back(plan):
            raise
    names = f"{draft.name} and {name}"
    if given:
        check_fits(given, draft.fingerprint, weights, names)
    calibration = given or find_calibration(folders, draft.fingerprint, weights, names)
    return CalibratedGate(plan.gate, calibration, plan.k or MAX_BLOCK)


def _end_of_blocks(plan: Plan, gate: Gate, k: BlockLength | int) -> Callable[[Seq[Signals]], bool] | None:
    """What ends a block before its length does.

    A block that is skipped costs no round, so where some are, only one that will be sent is weighed against that.
    """
    if plan.eager:
        return gate.is_unsure
    if isinstance(k, int):
        return None
    if not plan.is_gated:
        return k.is_enough
    return lambda signals: gate.is_unsure(signals) and k.is_enough(signals)


def _costs(plan: Plan, draft: Engine | None, target: Target | None) -> TargetCosts | None:
    """What an adaptive k starts from; None for a fixed one, and where the target is lost and not needed."""
    if plan.k is not None:
        return None
    if draft is None or target is None:
        raise OptionError("--k auto weighs drafting against verifying, so it needs both models.")
    try:
        return target.costs(quick=target.falls_back(plan))
    except CloudError as error:
        if not (target.falls_back(plan) or isinstance(error, CloudLost)):
            raise
        return None  # whoever verifies waits for it, or goes on alone


def _adaptive_k(
    plan: Plan, draft: Engine | None, costs: TargetCosts | None, risk: Risk, prompt_len: int
) -> BlockLength | int:
    if draft is None or costs is None:
        return DEFAULT_K  # nothing to weigh yet
    forward_ms = draft.profile.forward_ms
    model = CostModel(forward_ms[0], costs.forward_ms, costs.max_rows, wire_ms=costs.wire_ms, streams=costs.streams)
    # A gate judges drafts, so only where every block is verified anyway may a round draft nothing.
    read_ms = _read_ms(forward_ms, draft.invariant_rows)
    if costs.streams:  # a session that was a stream is opened again, and what was streamed fed
        read_ms += _read_ms(costs.forward_ms, costs.max_rows)
    return AutoK(
        model, risk, may_stream=not plan.is_gated, max_k=costs.max_block,
        read_ms=read_ms, prompt_ms=prompt_len * _read_ms(forward_ms, len(forward_ms)),
    )  # fmt: skip


def _read_ms(forward_ms: Seq[float], num_rows: int) -> float:
    """What a token takes that is read in forwards of so many rows, or of as many as were measured."""
    num_rows = max(min(num_rows, len(forward_ms)), 1)
    return forward_ms[num_rows - 1] / num_rows


def _risk(draft: Engine | None, costs: TargetCosts | None, calibrations: Iterable[Path]) -> Risk:
    """The calibrated chance of a disagreement, or one that is learned where the pair has no calibration.

    A fixed k needs it for the order of what is prepared alone, for which the server is not asked.
    """
    if draft is None or costs is None:
        return LearnedRisk()
    try:
        return CalibratedRisk(find_calibration(calibrations, draft.fingerprint, costs.weights, costs.model).risk)
    except (OptionError, RecordsError):
        return LearnedRisk()


def _longest(plan: Plan, params: DecodingParams, target: Target | None) -> int:
    """How long a block may get with tokens that a grammar forces; one without them is as long as the plan says."""
    if target is None or not params.grammar:
        return MAX_K
    try:
        return target.max_block(quick=target.falls_back(plan))
    except CloudError:
        return 0  # who is lost now may take no more than the plan's


def _missing(side: str) -> OptionError:
    return OptionError(f"This plan needs the {side} model.", hint=f"Pass {side}=skydraft.load(NAME).")
