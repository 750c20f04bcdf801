"""`skydraft doctor --cloud`: can the server be used from here, what does the link cost, and is speculation worth it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from skydraft import api
from skydraft.cli.options import build_engine_options, load_engine
from skydraft.config import DEFAULT_K, decoding_params
from skydraft.decoding.adaptive import MAX_AUTO_K, AutoK, expected_tokens
from skydraft.decoding.plan import make_plan
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine, RowProfile
from skydraft.engines.probe import probe
from skydraft.errors import CloudError, SkydraftError, VocabularyMismatch
from skydraft.evaluation.stats import percentile
from skydraft.protocol.codec import short_fingerprint
from skydraft.protocol.values import ServerInfo
from skydraft.types import StepRecord

_NUM_PINGS = 50
_NUM_TOKENS = 32
_PROMPTS = (
    "请用一句话描述春天的公园。",
    "请用一句话介绍长城。",
    "天空为什么是蓝色的？请用两句话回答。",
    "请写一句鼓励朋友的话。",
    "请用一句话说明什么是机器学习。",
)


def examine(console: Console, cloud: Cloud, given: dict[str, Any]) -> Iterator[str]:
    """Print what is found; yields what has to be done."""
    address = cloud.link.target
    try:
        info = cloud.info()
    except CloudError as error:
        yield f"{address} cannot be used: {error}"
        return
    encryption = "TLS" if cloud.link.uses_tls else "plaintext"
    console.print(f"cloud        {address}, skydraft {info.version}, {encryption}, token accepted or not wanted")
    console.print(
        f"             {info.model}, context {info.context_len}, {info.execution}, {info.max_rows} rows a forward, "
        f"{info.num_sessions} of {info.max_sessions} sessions in use"
    )
    pings = [cloud.link.ping() for _ in range(_NUM_PINGS)]
    rtt_ms = statistics.median(pings)
    console.print(f"round trip   p50 {rtt_ms:.2f} ms, p95 {percentile(pings, 95):.2f} ms ({_NUM_PINGS} health checks)")
    target = RowProfile(info.invariant_rows, info.forward_ms)
    rows = "  ".join(f"{n}: {ms:.1f}" for n, ms in enumerate(info.forward_ms, 1))
    console.print(f"t_v(n), ms   {rows}   (as the server measured when it first loaded the model)")
    offline = given.pop("offline")
    edge = load_engine(given["edge_model"], build_engine_options(given), offline=offline)
    try:
        _check_vocabulary(edge, info)
        alpha = _measure_acceptance(console, edge, cloud, min(DEFAULT_K, info.max_block))
    except SkydraftError as error:
        yield f"{edge.name} cannot draft for {info.model}: {error}"
        return
    draft = probe(edge)
    console.print(f"t_d          {draft.forward_ms[0]:.1f} ms a drafted token on this machine")
    _verdict(console, draft, target, info, alpha, rtt_ms)


def _check_vocabulary(edge: Engine, info: ServerInfo) -> None:
    if short_fingerprint(edge.vocab.fingerprint) != info.fingerprint:
        raise VocabularyMismatch(
            "the two models do not share a vocabulary.", hint="Choose another --edge-model, of the target's family."
        )


def _measure_acceptance(console: Console, edge: Engine, cloud: Cloud, k: int) -> float:
    """Acceptance per judged draft over five prompts, greedy."""
    records: list[StepRecord] = []
    for prompt in _PROMPTS:
        params = decoding_params(max_new_tokens=_NUM_TOKENS)
        with api.generate(prompt, edge=edge, cloud=cloud, plan=make_plan("lossless", k=k), params=params) as generation:
            records += generation.run().records
    judged = sum(min(record.num_accepted + 1, record.num_draft) for record in records)
    alpha = sum(record.num_accepted for record in records) / judged if judged else 0.0
    beside = statistics.median(
        record.wall_ms - record.draft_ms - record.cost.forward_ms - record.cost.queue_ms for record in records
    )
    num_bytes = sum(record.cost.bytes_up + record.cost.bytes_down for record in records)
    num_tokens = sum(record.num_committed for record in records)
    console.print(
        f"acceptance   {alpha:.2f} per judged draft, {num_tokens / len(records):.2f} tokens a round at k={k}, "
        f"{num_bytes / num_tokens:.1f} bytes a token ({len(_PROMPTS)} prompts, {num_tokens} tokens)"
    )
    console.print(f"on the link  {beside:.2f} ms a round beside the two models' forwards")
    return alpha


def _verdict(
    console: Console, draft: RowProfile, target: RowProfile, info: ServerInfo, alpha: float, rtt_ms: float
) -> None:
    """By rate = E(k) / (k·t_d + R + t_v(k+1)), with the target's rows in passes as this server runs them."""
    policy = AutoK(draft, target, info.max_rows, alpha=alpha, wire_ms=rtt_ms, streams=True)
    streamed = policy.tokens_per_ms(0)
    best = max(range(1, MAX_AUTO_K + 1), key=policy.tokens_per_ms)
    gain = policy.tokens_per_ms(best) / streamed
    # The round trip at which a round of `best` takes as long per token as streaming does.
    round_ms = expected_tokens(alpha, best) / policy.tokens_per_ms(best)
    break_even_ms = expected_tokens(alpha, best) / streamed - (round_ms - rtt_ms)
    console.print(f"\nstreaming    {1e3 * streamed:.1f} tokens/s (mode cloud)")
    console.print(f"speculation  {1e3 * policy.tokens_per_ms(best):.1f} tokens/s at best, with k = {best}")
    slower = f"verdict      streaming is faster here ({1 / gain:.2f} times)"
    if gain > 1:
        console.print(
            f"verdict      speculation is {gain:.2f} times as fast here; it pays up to R = {break_even_ms:.0f} ms"
        )
    elif break_even_ms > 0:
        console.print(f"{slower}; speculation would pay below a round trip of {break_even_ms:.1f} ms.")
    else:
        console.print(f"{slower}, whatever the link: rows and drafts cost too much.")
    if gain <= 1:
        console.print("             A gated mode still saves calls.")
