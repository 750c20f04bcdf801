import time
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol

from skydraft.config import DecodingParams, Execution
from skydraft.decoding.accounts.prices import Prices
from skydraft.decoding.accounts.receipt import Sent
from skydraft.decoding.context import Context
from skydraft.decoding.plan import Plan
from skydraft.decoding.race.branch import Branch, Came, Worth, num_fed
from skydraft.decoding.race.cost_model import row_ms
from skydraft.decoding.request import GenerateRequest, Prepared
from skydraft.decoding.verification import TargetSession, Verifier
from skydraft.engines.base import Engine
from skydraft.engines.vocab import Vocab
from skydraft.errors import CloudError
from skydraft.types import Cost, Draft, DraftBlock, LinkCost, Prompt, Reuse, Verdict


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Facts about a target before a text begins: its name and the fingerprint of its weights.

    A server without skydraft has no fingerprint: `weights` is then `named_weights` of its model, "" without a name.
    """

    name: str
    weights: str


class Target(Protocol):
    """The verifying side of a generation: an engine in this process, or a cloud.

    `engine` is the model, if it is in this process: its context bounds the text. It `is_exact` if other work in the
    same forwards cannot change its tokens. `prices` are the prices of its tokens, if known. A generation that
    `falls_back` continues with the draft model if its verifier is lost.
    """

    @property
    def engine(self) -> Engine | None: ...

    @property
    def is_exact(self) -> bool: ...

    def takes_drafts_of(self, draft: Engine | None) -> bool:
        """Whether the target takes drafts of this model (or copies) while it writes: both compute at the same time."""

    @property
    def prices(self) -> Prices | None: ...

    def facts(self, wait_s: float | None) -> TargetFacts | None:
        """Return facts about the target; None if it does not answer within `wait_s` seconds. Without `wait_s` wait as
        long as an answer may take; with 0 send nothing. Raises CloudError."""

    def plan_for(self, request: GenerateRequest) -> Plan:
        """Return the request's plan as this target can follow it. Raises OptionError if it cannot."""

    def falls_back(self, plan: Plan) -> bool: ...

    def meet_for(self, plan: Plan, vocab: Vocab) -> CloudError | None:
        """Connect. Return the outage if a text of this plan must begin without the target, else None. Raises CloudError
        if it must not begin without, or if waiting cannot help."""

    def verifier(
        self, context: Context, vocab: Vocab, request: Prepared, *, drafts_first: bool = True,
        outage: CloudError | None = None,
    ) -> Verifier:  # fmt: skip
        """Return the verifier of one generation with the committed tokens `context`. Ids belong to `vocab`. Without
        `drafts_first` the first round asks for a token of the target. With an `outage` the draft model begins the
        text."""


class LocalTarget:
    prices = None

    def __init__(self, engine: Engine, execution: Execution | None = None) -> None:
        self.engine, self._max_rows = engine, engine.max_rows(execution)
        self.is_exact = self._max_rows <= engine.invariant_rows

    def facts(self, wait_s: float | None) -> TargetFacts:
        return TargetFacts(self.engine.name, self.engine.fingerprint)

    def takes_drafts_of(self, draft: Engine | None) -> bool:
        return draft is not None and draft.on_gpu != self.engine.on_gpu

    def plan_for(self, request: GenerateRequest) -> Plan:
        return request.plan

    def falls_back(self, plan: Plan) -> bool:
        return False

    def meet_for(self, plan: Plan, vocab: Vocab) -> None:
        return None

    def verifier(
        self, context: Context, vocab: Vocab, request: Prepared, *, drafts_first: bool = True,
        outage: CloudError | None = None,
    ) -> Verifier:  # fmt: skip
        return LocalVerifier(
            self.engine, request.prompts.target, request.params,
            max_rows=self._max_rows, reuse=request.reuse, num_best=request.num_best,
            committed=context.generated[: context.num_seen].tolist(),
        )  # fmt: skip


def target_of(cloud: Engine | Target, execution: Execution | None = None) -> Target:
    return LocalTarget(cloud, execution) if isinstance(cloud, Engine) else cloud


class LocalVerifier(TargetSession):
    """Verifies with an engine in this process; its sequence is opened at the first verification. `max_rows` bounds the
    rows of one forward. Verdicts are bit-exact up to `engine.invariant_rows`."""

    def __init__(
        self, engine: Engine, prompt: Prompt, params: DecodingParams, *, max_rows: int,
        reuse: Reuse | None = None, num_best: int | None = None, committed: Seq[int] = (),
    ) -> None:  # fmt: skip
        super().__init__(engine, prompt, params, committed=committed, num_best=num_best)
        self._reuse, self._max_rows = reuse, max_rows
        self._num_to_write = 0
        self._is_closed = self.called = False
        self.sent, self.link = Sent(), LinkCost()  # nothing leaves this process
        self._branch, self._drafts, self._num_branches = Branch(Worth()), deque[Draft](), 0
        self.hear(lambda base, token_ids, num_accepted: None)

    def hear(self, came: Came) -> None:
        self._came = came

    def verify(self, block: DraftBlock, catch_up: Seq[int], write: int = 0) -> Verdict:
        """Return the verdict. Further tokens are computed when the loop asks for them. Raises like `check`."""
        self.check(block, catch_up)
        self.called = bool(block.token_ids) or not self._num_to_write
        block = block if self.called else DraftBlock(block.base, self._drafts_that_pay())
        cost = Cost() if self.is_seated else self._open()
        work = self.begin(block, catch_up)
        while (token_ids := work.next_feed(self._max_rows)) is not None:
            with self._engine.floor:  # another forward would overwrite the rows
                began = time.perf_counter()
                rows = work.sequence.extend(token_ids)
                cost += Cost(1, len(token_ids), forward_ms=(time.perf_counter() - began) * 1e3)
                work.absorb(rows)
        verdict = self.commit(work, cost)
        left = write if self.called else self._num_to_write - verdict.num_tokens
        goes_on = verdict.hands_over(block) if self.called else verdict.finish is None
        self._num_to_write = left if goes_on else 0
        self._came(block.base, verdict.commits(block), 0 if self.called else verdict.num_accepted)
        return verdict if self.called else replace(verdict, draft_ids=block.token_ids, branch=self._branch.number)

    def _drafts_that_pay(self) -> tuple[int, ...]:
        """Return drafts that may follow the text and are worth their rows."""
        while self._drafts:
            self._branch.take(self._drafts.popleft(), self.generated)
        token_ids = self._branch.after(self.generated)[: self._num_to_write - 1]
        waiting, forward_ms = [(self._branch.worth.share, len(token_ids))], self._engine.forward_ms
        (num,) = num_fed(1, waiting, self._max_rows, lambda num: row_ms(forward_ms, num), may_delay=True)
        return token_ids[:num]

    def _open(self) -> Cost:
        """Fill the cache with the prompt; returns the cost."""
        sequence = self._engine.begin(self._prompt.token_ids, self._prompt.media, self._reuse)
        self.adopt(sequence)
        if self._is_closed:
            super().close()
        self._engine.fill(sequence, self._prompt.token_ids)
        return sequence.take_prefill_cost()

    def draft(self, draft: Draft) -> None:
        goes_on, self._num_branches = draft.branch == self._num_branches, draft.branch
        self._drafts.append(Draft(0, 0, draft.token_ids) if goes_on else draft)

    def stop(self) -> bool:
        self._num_to_write = 0
        return True

    def take_cost(self) -> LinkCost:
        return self.link

    def close(self, *, failed: bool = False) -> None:
        """Close for good: a running prefill or verification ends with an error. Any thread may call this."""
        self._is_closed = True
        super().close(failed=failed)

    cancel = close
