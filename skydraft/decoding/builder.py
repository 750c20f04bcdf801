from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from skydraft.choosing.chooser import Chooser
from skydraft.choosing.stopping import Stopping
from skydraft.choosing.thinking import ThinkingAlong
from skydraft.config import DEFAULT_K, MAX_K, OPENING, DecodingParams
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
from skydraft.decoding.request import GenerateRequest, Prepared
from skydraft.decoding.target import Target, TargetFacts
from skydraft.decoding.turns import Turns
from skydraft.engines.base import Engine, Seats
from skydraft.engines.vocab import Vocab, check_same
from skydraft.errors import OptionError
from skydraft.gating.allowance import Allowance
from skydraft.gating.calibration import MAX_BLOCK, find_calibration
from skydraft.gating.gates import START, Gate
from skydraft.prompts.pair import PromptPair, read_prompt
from skydraft.prompts.systems import readable
from skydraft.prompts.thinking import settings, tags_after, template_of
from skydraft.types import Prompt

_READ_ROWS = 16  # of one forward that reads the target's tokens
_MOST_PREDICTED = 1 << 17  # tokens
_CHARS_READ = 8  # of a prediction, for each token of the context: encoding megabytes takes minutes
_QUICK_S = 0.5  # wait for facts about the target if the text can go on without it


def start_generation(
    request: GenerateRequest, edge: Engine | None, target: Target | None, watch: Watch, calibrations: Iterable[Path]
) -> Generation:
    """Start a generation. `edge` drafts, or encodes the prompt for a remote target; the plan may need only one side.

    Calibrations come from the folders `calibrations` and the package. Raises UsageError before anything is computed.
    """
    parts = _Parts(request, edge, target, calibrations)
    return Generation(parts.loop(), parts.request, parts.draft or edge, target, watch)


class _Parts:
    """The two sides of one generation, facts about them, and the parts of its loop."""

    def __init__(
        self, request: GenerateRequest, edge: Engine | None, target: Target | None, calibrations: Iterable[Path]
    ) -> None:
        self.draft, self.target, self.reader = _sides(request.plan, edge, target)
        plan = self.target.plan_for(request) if self.target else request.plan
        if plan.drafts and self.draft is None:  # no draft model, so no fallback
            plan = replace(plan, drafts=False)
        self.local = self.target.engine if self.target else None
        self.races = self.target is not None and self.target.takes_drafts_of(self.draft)
        self.plan = plan.streaming() if self.races and plan.k is None else plan
        self.vocab = (self.local or self.reader).vocab  # a local target decodes its own text
        self.request = prompted(request, self.reader, plan)
        self.outage = self.target.meet_for(self.plan, self.vocab) if self.target else None
        self.facts = self._facts()
        self.gate = self._gate(calibrations)
        self.context, self.max_new_tokens = self._context()
        self.costs: CostModel | None = None  # only if both models share a processor
        if self.local and self.plan.k is None and not self.races:
            draft_ms = self.draft.forward_ms[0] if self.draft else 0.0
            self.costs = CostModel(draft_ms, self.local.forward_ms, self.local.max_rows(request.execution))

    def loop(self) -> SpeculativeLoop:
        request, params, turns = self.request, self.request.params, self._turns()
        drafter = self._drafter(turns) if self.draft else None
        verifier = None
        if self.target:
            # If the draft model writes first, the target reads its prompt meanwhile.
            verifier = self.target.verifier(
                self.context, self.vocab, request,
                drafts_first=turns.longest() > 0 or turns.reads, outage=self.outage,
            )  # fmt: skip
        copies, ahead = self._copies(), None
        # Drafts are sent only while the target writes several tokens. With scores, wrong drafts would be scored too.
        writes_on = request.plan.k is None or request.plan.back.num_tokens > 0
        if (drafter or copies) and verifier and self.races and writes_on and request.num_best is None:
            copies, ahead = None, Ahead(drafter, self.request.prompts.edge, verifier.draft, copies)
            verifier.hear(ahead.came)
        return SpeculativeLoop(
            self.context, drafter, self.gate, verifier, turns, self.vocab,
            falls_back=self.target is not None and self.target.falls_back(self.plan),
            breaks_loops=request.breaks_loops and not params.grammar,  # a list of equal values is legitimate
            thinking=ThinkingAlong(params, self.vocab) if params.think_end else None,
            copies=copies, ahead=ahead, seats=Seats((self.draft, self.local)),
        )  # fmt: skip

    def _facts(self) -> TargetFacts | None:
        """Return facts about the target for a calibrated gate; None if it does not answer in time.

        In an outage older facts will do.
        """
        if self.target is None or self.plan.gate.kind != "calibrated":
            return None
        if not self.target.falls_back(self.plan):
            return self.target.facts(None)
        return self.target.facts(0 if self.outage else _QUICK_S)

    def _gate(self, calibrations: Iterable[Path]) -> Gate:
        """Choose the adapter for this prompt and return the gate. An adapter that nobody named is left out if the gate
        has no calibration for it."""
        spec, plain = self.plan.gate, self.draft
        if plain is None:
            return Gate(spec)
        self.draft = plain.adapters.choose(self.request.adapter, self.request.prompts.edge.token_ids)
        if spec.kind != "calibrated":
            return Gate(spec)
        try:
            return Gate(spec, self._allowance(self.draft, calibrations))
        except OptionError:
            if self.draft is plain or (self.request.adapter or plain.adapters.default) != "auto":
                raise
            self.draft = plain
            return Gate(spec, self._allowance(plain, calibrations))

    def _allowance(self, draft: Engine, folders: Iterable[Path]) -> Allowance:
        plan, facts = self.plan, self.facts
        names = f"{draft.name} and {facts.name if facts else 'a target that cannot be reached'}"
        weights = facts.weights if facts else None
        calibration = find_calibration(folders, draft.fingerprint, weights, names, self.request.calibration)
        limit = calibration.limit(plan.gate.threshold, plan.k or MAX_BLOCK, plan.back)
        return Allowance(calibration, plan.gate.threshold, limit)

    def _context(self) -> tuple[Context, int]:
        """Return the context with the tokens that begin the answer, and the most tokens to generate. The author of the
        text sets that limit; a draft model with a shorter context stops drafting there."""
        request, prompts = self.request, self.request.prompts
        author, read = (self.local, prompts.target) if self.target else (self.draft, prompts.edge)
        max_new_tokens = request.params.max_new_tokens
        if author:
            max_new_tokens = min(max_new_tokens, author.room(read.token_ids, read.media))
        begun = () if request.begun_is_prompt else request.begun
        _check_begun(begun, request.params, self.vocab, max_new_tokens)
        scores = None if request.num_best is None else Scores(request.num_best, len(begun))
        prompt = prompts.edge if self.draft else prompts.target
        context = Context(prompt, scores=scores, finish=None if request.writes else "length", begun=begun)
        return context, max_new_tokens

    def _turns(self) -> Turns:
        """Who writes when."""
        plan = self.plan
        if self.costs and self.draft:
            read_ms = self.draft.forward_ms[: self.draft.max_rows(None)][:_READ_ROWS]
            return Blocks(self.costs, read_ms[-1] / len(read_ms), len(self.request.prompts.edge.token_ids))
        thinks = bool(self.request.params.think_end)
        opens = plan.k and START in plan.gate.content_rules and not self.context.base and not thinks
        k, opening = (plan.k or DEFAULT_K), (OPENING if opens else 0)
        return Turns(k, plan.back, opening, streams=plan.streams)

    def _drafter(self, turns: Turns) -> Drafter:
        plan, request = self.plan, self.request
        assert self.draft is not None
        is_unsure = self.gate.is_unsure
        ends_blocks = is_unsure if plan.ends_early else turns.end_of_opening(is_unsure)
        return Drafter(
            self.draft, self.request.prompts.edge, request.params, self.max_new_tokens, ends_blocks=ends_blocks,
            with_signals=request.with_signals or plan.gate.needs_signals,
            reuse=request.reuse, scores=self.context.scores,
            # Drafts may be computed inexactly: the target decides.
            execution="throughput" if self.races and not plan.is_lossy else request.execution,
        )  # fmt: skip

    def _copies(self) -> Copies | None:
        """Return drafts without a model, for texts that the target writes. Classic rounds (`--k`) have none."""
        if self.request.plan.k is not None:
            return None
        most = min(self.reader.context_len, _MOST_PREDICTED)
        prediction = self.reader.vocab.literal((self.request.prediction or "")[: _CHARS_READ * most])[:most]
        return Copies(self.request.prompts.edge.token_ids, prediction, MAX_K, self.costs)


def _sides(plan: Plan, edge: Engine | None, target: Target | None) -> tuple[Engine | None, Target | None, Engine]:
    """Return the draft model and the target, if the plan has them, and the model that encodes the prompt."""
    draft, verifying = (edge if plan.drafts else None), (target if plan.verifies else None)
    if plan.drafts and edge is not None and not edge.drafts:
        if plan.is_lossy or plan.k is not None:
            raise OptionError("Without a draft model only mode lossless works.", hint="Name one: --edge-model.")
        draft = None
    local = verifying.engine if verifying else None
    reader = draft or local or edge
    missing = "cloud" if plan.verifies and not verifying else "edge"
    if reader is None or missing == "cloud" or (plan.drafts and edge is None):
        raise OptionError(f"This plan needs the {missing} model.", hint=f"Pass {missing}=skydraft.load(NAME).")
    if draft and local:
        check_same(draft.vocab, local.vocab)
    return draft, verifying, reader


def prompted(request: GenerateRequest, reader: Engine, plan: Plan | None = None) -> Prepared:
    """Return the request with its prompts, and with another `plan` if given. Raises OptionError if thinking does not
    apply."""
    vocab, params, messages = reader.vocab, request.params, request.messages
    is_bare = request.raw or bool(request.prompt_ids)
    wanted = {"--think": request.think == "on", "--think-budget": params.think_budget > 0}
    thinks = bool(params.think_end) if is_bare else template_of(vocab.chat_template).thinks
    if not thinks and (unfit := [option for option, is_given in wanted.items() if is_given]):
        raise OptionError(f"{unfit[0]} does not apply to a prompt without a chat template that knows thinking.")
    if not is_bare and any(message.role == "system" for message in messages):
        messages = tuple(readable(vocab, messages, request.tools))
    prompts = PromptPair(Prompt(request.prompt_ids), Prompt(request.prompt_ids))
    if not request.prompt_ids:
        given = {} if is_bare else settings(vocab, request.think, dict(request.settings))
        prompts = read_prompt(reader, messages, raw=request.raw, tools=request.tools, settings=given)
    if not is_bare:
        tags = tags_after(vocab, messages, prompts.edge.token_ids, request.think)
        tags = tags.after(vocab.written(request.begun)) if request.begun_is_prompt else tags
        budget = params.think_budget if tags.end else 0
        params = replace(params, think_start=tags.start, think_end=tags.end, think_budget=budget)
    asked: dict[str, Any] = {each.name: getattr(request, each.name) for each in fields(GenerateRequest)}
    asked |= {"plan": plan or request.plan, "messages": messages, "params": params}
    return Prepared(**asked, prompts=prompts.then(request.begun) if request.begun_is_prompt else prompts)


def _check_begun(begun: tuple[int, ...], params: DecodingParams, vocab: Vocab, max_new_tokens: int) -> None:
    stopping, token_ids = Stopping(params, vocab, max_new_tokens), np.array(begun, np.int32)
    if any(stopping.finish(token_ids[:length]) for length in range(1, len(begun) + 1)):
        raise OptionError("The answer would end within its given first tokens.", hint="Give fewer of them.")
    if begun and Chooser(params, vocab, 0).has_left(token_ids):
        raise OptionError("The answer's given first tokens break its grammar.", hint="Give others.")
