"""Measurements of `skydraft doctor`: when drafting pays, here and over a link."""

import statistics
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from skydraft import api
from skydraft.config import DEFAULT_K, DecodingParams
from skydraft.decoding.block_length import MAX_AUTO_K, AutoTurns
from skydraft.decoding.cost_model import CostModel, measured_alpha
from skydraft.decoding.plan import make_plan
from skydraft.decoding.stats import percentile
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.protocol.values import ServerInfo
from skydraft.types import LinkCost, StepRecord

NUM_PINGS = 50
_PING_S = 5.0
_NUM_TOKENS = 32
_LONGEST_RUN = 16  # tokens; AutoTurns tells no longer ones apart
PROMPTS = (
    "请用一句话描述春天的公园。",
    "请用一句话介绍长城。",
    "天空为什么是蓝色的？请用两句话回答。",
    "请写一句鼓励朋友的话。",
    "请用一句话说明什么是机器学习。",
)


def drafts_after(costs: CostModel) -> int | None:
    """How many tokens in a row the draft model must have written as the target did before lossless with k auto drafts.
    0: it drafts from the start of a text; None: never. Nothing is known of the text yet but this run."""
    policy = AutoTurns(costs)
    for run in range(_LONGEST_RUN + 1):
        if policy.longest():
            return run
        policy.read([True])
    return None


@dataclass(frozen=True, slots=True)
class LinkReport:
    """Measurements over a link with `k` drafted tokens a round, and the speeds that `costs` predict from them."""

    k: int
    alpha: float
    num_tokens: int
    num_rounds: int
    bytes_per_token: float
    wire_ms: float  # of a round beside the two models' forwards
    costs: CostModel

    @property
    def best_k(self) -> int:
        return self.costs.best_k(self.alpha, 1, MAX_AUTO_K)

    @property
    def gain(self) -> float:
        """Speed with the best k relative to streaming the target."""
        return self.costs.tokens_per_s(self.alpha, self.best_k) / self.costs.tokens_per_s(self.alpha, 0)

    @property
    def break_even_ms(self) -> float:
        return self.costs.break_even_ms(self.alpha, self.best_k)

    @property
    def tokens_per_round(self) -> float:
        return self.num_tokens / self.num_rounds


def ping_times(cloud: Cloud) -> tuple[float, float]:
    """(median, 95th percentile) of health checks, milliseconds."""
    pings = [cloud.ping(_PING_S) for _ in range(NUM_PINGS)]
    return statistics.median(pings), percentile(pings, 95) or 0.0


def examine_link(
    edge: Engine, cloud: Cloud, info: ServerInfo, rtt_ms: float, done: Callable[[], None] = lambda: None
) -> LinkReport:
    """Answer a few prompts greedily over the link and measure its costs. Raises SkydraftError."""
    k = min(DEFAULT_K, info.max_block)
    records: list[StepRecord] = []
    for prompt in PROMPTS:
        params, plan = DecodingParams(max_new_tokens=_NUM_TOKENS), make_plan("lossless", k=k)
        with api.generate(prompt, edge=edge, cloud=cloud, plan=plan, params=params) as generation:
            records += generation.run().records
        done()
    link = sum((record.link for record in records), LinkCost())
    num_tokens = sum(record.num_committed for record in records)
    beside = [r.wall_ms - r.draft.forward_ms - r.target.forward_ms - r.target.queue_ms for r in records]
    stored = CostModel(edge.profile.forward_ms[0], info.forward_ms, info.max_rows, wire_ms=rtt_ms, streams=True)
    alpha = measured_alpha((record.num_accepted, record.num_draft) for record in records) or 0.0
    return LinkReport(
        k=k, alpha=alpha, num_tokens=num_tokens, num_rounds=len(records), wire_ms=statistics.median(beside),
        bytes_per_token=(link.bytes_up + link.bytes_down) / num_tokens,
        costs=costs_now(records, stored),
    )  # fmt: skip


def costs_now(records: Seq[StepRecord], stored: CostModel) -> CostModel:
    """`stored`, but with the median times of these rounds: what was measured once may be of a busy hour."""
    drafts = [each.draft for each in records if 0 < each.draft.num_rows < 2 * each.draft.num_passes]
    targets = [each.target for each in records if each.target.num_passes]
    steps_ms = [(each.forward_ms - each.prefill_ms) / each.num_passes for each in drafts]
    slowdowns = [
        (each.forward_ms - each.prefill_ms) / stored.pass_ms(max(1, round(each.num_rows / each.num_passes)))
        / each.num_passes for each in targets
    ]  # fmt: skip
    return replace(
        stored,
        draft_ms=statistics.median(steps_ms) if steps_ms else stored.draft_ms,
        slowdown=statistics.median(slowdowns) if slowdowns else 1.0,
    )
