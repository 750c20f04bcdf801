"""`skydraft doctor --cloud`: whether the server can be used from here, and what the link to it is worth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from rich.console import Console

from skydraft.cli.cloud_options import CloudChoice
from skydraft.cli.model_options import ModelChoice
from skydraft.cli.terminal import TERMINAL
from skydraft.edge.connection import Cloud
from skydraft.edge.fleet import difference
from skydraft.engines.base import Engine
from skydraft.errors import CloudError, SkydraftError
from skydraft.evaluation.diagnosis import NUM_PINGS, PROMPTS, LinkReport, examine_link, ping_times
from skydraft.protocol.values import ServerInfo


def examine(console: Console, choice: CloudChoice, models: ModelChoice, *, measures: bool) -> Iterator[str]:
    """Print what is found of each server; yields what has to be done. Without `measures`, no model is loaded."""
    edge = None
    met: dict[str, ServerInfo] = {}
    for one in choice.each():
        with closing(one.connected()) as cloud:
            try:
                info, rtt_ms = _ask(console, cloud)
            except CloudError as error:
                yield f"{cloud.link.target} cannot be used: {error.line}"
                continue
            met[cloud.link.target] = info
            if measures:
                edge = edge or models.load_edge()
                yield from _measure(console, cloud, edge, info, rtt_ms)
    yield from _unlike(met)


def _unlike(met: dict[str, ServerInfo]) -> Iterator[str]:
    """What keeps servers from standing in for each other."""
    if met:
        first = next(iter(met))
        differences = [difference(name, info, first, met[first]) for name, info in met.items()]
        yield from (unlike.line for unlike in differences if unlike)


def _ask(console: Console, cloud: Cloud) -> tuple[ServerInfo, float]:
    """What a server runs, and the round trip to it in milliseconds; both are printed. Raises CloudError."""
    address = cloud.link.target
    with TERMINAL.state(f"Asking {address}…"):
        info = cloud.info()
        rtt_ms, late_ms = ping_times(cloud)
    encryption = "TLS" if cloud.link.uses_tls else "plaintext"
    console.print(f"cloud        {address}, skydraft {info.version}, {encryption}, token accepted or not needed")
    engine = f" on {info.engine} ({info.dtype})" if info.engine else ""
    console.print(
        f"             {info.model}{engine}, context {info.context_len}, {info.execution}, "
        f"{info.max_rows} rows a forward, {info.num_sessions} of {info.max_sessions} sessions in use"
    )
    console.print(f"round trip   p50 {rtt_ms:.2f} ms, p95 {late_ms:.2f} ms ({NUM_PINGS} health checks)")
    rows = "  ".join(f"{n}: {ms:.1f}" for n, ms in enumerate(info.forward_ms, 1))
    console.print(f"t_v(n), ms   {rows}   (as the server measured when it first loaded the model)")
    return info, rtt_ms


def _measure(console: Console, cloud: Cloud, edge: Engine, info: ServerInfo, rtt_ms: float) -> Iterator[str]:
    try:
        with TERMINAL.state(f"Answering {len(PROMPTS)} prompts over the link…"):
            found = examine_link(edge, cloud, info, rtt_ms)
    except SkydraftError as error:
        yield f"{edge.name} cannot draft for {info.model}: {error.line}"
        return
    _show(console, found)


def _show(console: Console, found: LinkReport) -> None:
    costs, alpha, k, even_ms = found.costs, found.alpha, found.best_k, found.break_even_ms
    console.print(
        f"acceptance   {alpha:.2f} per judged draft, {found.tokens_per_round:.2f} tokens a round at k={found.k}, "
        f"{found.bytes_per_token:.1f} bytes a token ({len(PROMPTS)} prompts, {found.num_tokens} tokens)"
    )
    console.print(f"on the link  {found.wire_ms:.2f} ms a round beside the two models' forwards")
    console.print(f"t_d          {costs.draft_ms:.1f} ms a drafted token on this machine")
    console.print(f"\nstreaming    {costs.tokens_per_s(alpha, 0):.1f} tokens/s (mode cloud)")
    console.print(f"speculation  {costs.tokens_per_s(alpha, k):.1f} tokens/s at best, with k = {k}")
    if found.gain > 1:
        pays = f"it pays up to a round trip of {even_ms:.0f} ms"
        console.print(f"verdict      speculation is {found.gain:.2f} times as fast here; {pays}")
        return
    why = "and no link would change that: rows and drafts cost too much."
    if even_ms > 0:
        why = f"speculation would pay below a round trip of {even_ms:.1f} ms."
    console.print(f"verdict      streaming is faster here ({1 / found.gain:.2f} times); {why}")
    console.print("             A gated mode still saves calls.")
