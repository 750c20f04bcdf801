from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import numpy as np

from skydraft.choosing.chooser import Chooser
from skydraft.choosing.stopping import Stopping
from skydraft.choosing.thinking import ThinkingAlong
from skydraft.config import DEFAULT_K, MAX_K, OPENING, DecodingParams, Execution
from skydraft.decoding.accounts.scoring import Scores
from skydraft.decoding.context import Context
from skydraft.decoding.drafting import Drafter
from skydraft.decoding.generation import Generation, Watch
from skydraft.decoding.loop import SpeculativeLoop
from skydraft.decoding.plan import Plan
from skydraft.decoding.race.ahead import Ahead
from skydraft.decoding.race.block_length import Blocks
from skydraft.decoding.race.copying import Copies
from skydraft.decoding.race.cost_model import CostModel
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.target import Target, TargetFacts
from skydraft.decoding.turns import Turns
from skydraft.engines.base import Engine, Seats
from skydraft.engines.vocab import Vocab, check_same
from skydraft.errors import CloudError, OptionError
from skydraft.gating.allowance import Allowance
from skydraft.gating.calibration import MAX_BLOCK, find_calibration
from skydraft.gating.gates import START, Gate
from skydraft.prompts.pair import PromptPair, read_prompt
from skydraft.prompts.systems import readable
from skydraft.prompts.thinking import settings, tags_after, template_of
from skydraft.types import Prompt, Signals

_READ_ROWS = 16  # of one forward, when the draft model reads along
_MOST_PREDICTED = 1 << 17  # tokens
_CHARS_READ = 8  # of a prediction, for each token of the context: a text of megabytes takes minutes
_QUICK_S = 0.5  # how long a text that may continue alone waits for facts about the target


def start_generation(
    request: GenerateRequest, edge: Engine | None, target: Target | None, watch: Watch, calibrations: Iterable[Path]
) -> Generation:
    """Start a generation. `edge` drafts, or encodes the prompt for a remote target; the plan may need only one side.

    Calibrations are looked up in the folders `calibrations` and in the package. Raises UsageError before anything is
    computed.
    """
    plan = request.plan
    draft, verifying, reader = _sides(plan, edge, target)
    if plan.drafts and draft is None:  # nothing could go on alone
        plan = replace(plan, drafts=False)
        request = replace(request, plan=plan)
    races = verifying is not None and verifying.takes_drafts_of(draft)
    plan = plan.streaming() if races and plan.k is None else plan
    local = verifying.engine if verifying else None
    vocab = (local or reader).vocab  # a local target decodes its text, with any draft model
    request, prompts = prompted(request, reader)
    outage = verifying.meet_for(plan, vocab) if verifying else None
    facts = _facts(plan, verifying, outage)
    draft, gate = _drafting(request, draft, prompts.edge, facts, calibrations)
    context, max_new_tokens = _context(request, prompts, draft, verifying, vocab)
    opens = plan.k and START in plan.gate.content_rules and not context.base and not request.params.think_end
    costs = _costs(draft, local, request.execution) if local and plan.k is None and not races else None
    turns = _turns(plan, draft, costs, len(prompts.edge.token_ids), OPENING if opens else 0)
    drafter = verifier = None
    if draft:
        drafter = Drafter(
            draft, prompts.edge, request.params, max_new_tokens, ends_blocks=_end_of_blocks(plan, gate, turns),
            with_signals=request.with_signals or plan.gate.needs_signals,
            reuse=request.reuse, scores=context.scores,
            # What is only drafted may be read in any parts.
            execution="throughput" if races and not plan.is_lossy else request.execution,
        )  # fmt: skip
    if verifying:
        # The target reads its prompt while the draft model reads, if that begins with it.
        drafts_first = turns.longest() > 0 or turns.reads
        verifier = verifying.verifier(context, prompts.target, vocab, request, drafts_first=drafts_first, outage=outage)
    falls_back = bool(verifying and verifying.falls_back(plan))
    thinking = ThinkingAlong(request.params, vocab) if request.params.think_end else None
    breaks_loops = request.breaks_loops and not request.params.grammar  # a list of equal values is no loop
    copies, ahead = _copies(request, prompts, costs, draft or edge), None
    if (drafter or copies) and verifier and races and _writes_on(request):
        copies, ahead = None, Ahead(drafter, prompts.edge, verifier.draft, copies)
        verifier.hear(ahead.came)
    loop = SpeculativeLoop(
        context, drafter, gate, verifier, turns, vocab, falls_back, breaks_loops, thinking, copies, ahead,
        Seats((draft, local)),
    )  # fmt: skip
    return Generation(loop, request, prompts, draft or edge, target, watch)


def _writes_on(request: GenerateRequest) -> bool:
    """Whether the target writes several tokens in a row, so that drafts may come meanwhile. Scores of drafts that do
    not stand would be kept for nothing."""
    plan = request.plan
    return (plan.k is None or plan.back.num_tokens > 0) and request.num_best is None


def _copies(
    request: GenerateRequest, prompts: PromptPair, costs: CostModel | None,
    reader: Engine | None,
) -> Copies | None:  # fmt: skip
    """Drafts without a model, where the target writes. `--k` is the rounds of the literature, which have none."""
    if reader is None or request.plan.k is not None:
        return None
    most = min(reader.context_len, _MOST_PREDICTED)
    prediction = reader.vocab.literal((request.prediction or "")[: _CHARS_READ * most])[:most]
    return Copies(prompts.edge.token_ids, prediction, MAX_K, costs)


def _sides(plan: Plan, edge: Engine | None, target: Target | None) -> tuple[Engine | None, Target | None, Engine]:
    """The draft model and the target, where the plan has them; and the model that encodes the prompt."""
    draft, verifying = (edge if plan.drafts else None), (target if plan.verifies else None)
    if plan.drafts and edge is not None and not edge.drafts:
        if plan.is_lossy or plan.k is not None:
            raise OptionError("Without a draft model there is no mode but lossless.", hint="Name one: --edge-model.")
        draft = None
    local = verifying.engine if verifying else None
    if plan.verifies and not verifying:
        raise _missing("cloud")
    reader = draft or local or edge
    if reader is None or (plan.drafts and edge is None):
        raise _missing("edge")
    if draft and local:
        check_same(draft.vocab, local.vocab)
    return draft, verifying, reader


def _context(
    request: GenerateRequest, prompts: PromptPair, draft: Engine | None, verifying: Target | None, vocab: Vocab
) -> tuple[Context, int]:
    """The text with what it begins with, and how many tokens it may have. The model whose text it is sets the limit; a
    draft model with a shorter context stops drafting there."""
    author, read = (verifying.engine, prompts.target) if verifying else (draft, prompts.edge)
    max_new_tokens = request.params.max_new_tokens
    if author:
        max_new_tokens = min(max_new_tokens, author.room(read.token_ids, read.media))
    begun = () if request.begun_is_prompt else request.begun
    _check_begun(begun, request.params, vocab, max_new_tokens)
    scores = None if request.num_best is None else Scores(request.num_best, len(begun))
    prompt = prompts.edge if draft else prompts.target
    context = Context(prompt, scores=scores, finish=None if request.writes else "length", begun=begun)
    return context, max_new_tokens


def prompted(request: GenerateRequest, reader: Engine) -> tuple[GenerateRequest, PromptPair]:
    """The prompts, and the request with the tags of thinking after them. Raises OptionError where it cannot be kept."""
    vocab, params, is_bare = reader.vocab, request.params, request.raw or bool(request.prompt_ids)
    wanted = {"--think": request.think == "on", "--think-budget": params.think_budget > 0}
    thinks = bool(params.think_end) if is_bare else template_of(vocab.chat_template).thinks
    if not thinks and (unfit := [option for option, is_given in wanted.items() if is_given]):
        raise OptionError(f"{unfit[0]} does not apply to a prompt without a chat template that knows thinking.")
    if request.prompt_ids:
        return request, PromptPair(Prompt(request.prompt_ids), Prompt(request.prompt_ids))
    given = {} if is_bare else settings(vocab, request.think, dict(request.settings))
    if not is_bare and any(message.role == "system" for message in request.messages):
        request = replace(request, messages=tuple(readable(vocab, request.messages, request.tools)))
    prompts = read_prompt(reader, request.messages, raw=request.raw, tools=request.tools, settings=given)
    if not is_bare:
        tags = tags_after(vocab, request.messages, prompts.edge.token_ids, request.think)
        tags = tags.after(vocab.written(request.begun)) if request.begun_is_prompt else tags
        budget = params.think_budget if tags.end else 0
        params = replace(params, think_start=tags.start, think_end=tags.end, think_budget=budget)
        request = replace(request, params=params)
    return request, prompts.then(request.begun) if request.begun_is_prompt else prompts


def _check_begun(begun: tuple[int, ...], params: DecodingParams, vocab: Vocab, max_new_tokens: int) -> None:
    stopping, token_ids = Stopping(params, vocab, max_new_tokens), np.array(begun, np.int32)
    if any(stopping.finish(token_ids[:length]) for length in range(1, len(begun) + 1)):
        raise OptionError("The answer ends within the tokens that it is to begin with.", hint="Give fewer of them.")
    if begun and Chooser(params, vocab, 0).has_left(token_ids):
        raise OptionError("The tokens that the answer is to begin with leave its grammar.", hint="Give others.")


def _facts(plan: Plan, target: Target | None, outage: CloudError | None) -> TargetFacts | None:
    """Facts about the target for a calibrated gate; None if the target does not answer while the plan can wait. In an
    outage older ones will do."""
    if target is None or plan.gate.kind != "calibrated":
        return None
    return target.facts(None if not target.falls_back(plan) else 0 if outage else _QUICK_S)


def _drafting(
    request: GenerateRequest, edge: Engine | None, prompt: Prompt, facts: TargetFacts | None,
    calibrations: Iterable[Path],
) -> tuple[Engine | None, Gate]:  # fmt: skip
    """The draft model, with the adapter for this prompt, and the gate for both. An adapter that nobody named is left
    out where the gate needs a calibration and has none for it."""
    if edge is None:
        return None, _gate(request, None, facts, calibrations)
    adapted = edge.adapters.choose(request.adapter, prompt.token_ids)
    try:
        return adapted, _gate(request, adapted, facts, calibrations)
    except OptionError:
        if adapted is edge or (request.adapter or edge.adapters.default) != "auto":
            raise
        return edge, _gate(request, edge, facts, calibrations)


def _gate(request: GenerateRequest, draft: Engine | None, facts: TargetFacts | None, folders: Iterable[Path]) -> Gate:
    plan = request.plan
    if plan.gate.kind != "calibrated":
        return Gate(plan.gate)
    assert draft is not None  # a plan without one has the gate `always`
    names = f"{draft.name} and {facts.name if facts else 'a target that cannot be reached'}"
    weights = facts.weights if facts else None
    calibration = find_calibration(folders, draft.fingerprint, weights, names, request.calibration)
    limit = calibration.limit(plan.gate.threshold, plan.k or MAX_BLOCK, plan.back)
    return Gate(plan.gate, Allowance(calibration, plan.gate.threshold, limit))


def _end_of_blocks(plan: Plan, gate: Gate, turns: Turns) -> Callable[[Seq[Signals]], bool] | None:
    """What ends a block early."""
    if plan.ends_early:
        return gate.is_unsure
    return turns.end_of_opening(gate.is_unsure) if turns.opens else None


def _costs(draft: Engine | None, local: Engine, execution: Execution | None) -> CostModel:
    """Costs of both models in this process."""
    return CostModel(draft.forward_ms[0] if draft else 0.0, local.forward_ms, local.max_rows(execution))


def _turns(plan: Plan, draft: Engine | None, costs: CostModel | None, prompt_len: int, opening: int) -> Turns:
    """Who writes when."""
    if costs and draft:
        read_ms = draft.forward_ms[: draft.max_rows(None)][:_READ_ROWS]
        return Blocks(costs, read_ms[-1] / len(read_ms), prompt_len)
    return Turns(plan.k or DEFAULT_K, plan.back, opening, streams=plan.streams)


def _missing(side: str) -> OptionError:
    return OptionError(f"This plan needs the {side} model.", hint=f"Pass {side}=skydraft.load(NAME).")
