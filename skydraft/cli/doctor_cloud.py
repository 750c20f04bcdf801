"""What `skydraft doctor --cloud` says of servers."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from skydraft import api
from skydraft.characters import one_line
from skydraft.cli.doctor_devices import measure_devices
from skydraft.cli.pair_options import CloudChoice, ModelChoice
from skydraft.cli.terminal import TERMINAL, counted
from skydraft.config import DecodingParams
from skydraft.decoding.cost_model import CostModel
from skydraft.decoding.generation import Generation
from skydraft.decoding.plan import make_plan
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.errors import CloudError, CloudLost, OptionError, SkydraftError
from skydraft.evaluation.diagnosis import NUM_PINGS, PROMPTS, drafts_after, examine_link, ping_times
from skydraft.protocol.address import is_url
from skydraft.protocol.values import ServerInfo
from skydraft.types import StepRecord

_LOOK_S = 3.0  # for the first sign of life
_NUM_WRITTEN = 16  # tokens that a server without skydraft writes to show what it can


@dataclass(frozen=True, slots=True)
class CheckChoice:
    """What to measure: nothing, which loads no model, or also what `devices` get in `seconds` of each mode."""

    no_measure: bool
    probe_again: bool
    devices: int | None
    seconds: float


def examine_cloud(console: Console, choice: CloudChoice, models: ModelChoice, checks: CheckChoice) -> Iterator[str]:
    """Print findings about each server; yields steps for the user."""
    edge = None
    met: dict[str, ServerInfo] = {}
    if is_url(choice.address or ""):
        if checks.no_measure:
            raise OptionError("--no-measure does not apply to a server without skydraft.", hint="Leave it out.")
        yield from _examine_stock(console, choice, models, checks)
        return
    for one in choice.each():
        with closing(one.connect()) as cloud:
            try:
                info, rtt_ms = _ask(console, cloud)
            except CloudError as error:
                yield f"{cloud.name} cannot be used: {error.line}"
                continue
            met[cloud.name] = info
            if not checks.no_measure:
                edge = edge or models.load_edge()
                yield from _measure_link(console, cloud, edge, info, rtt_ms)
                if checks.devices:
                    yield from measure_devices(console, partial(_device, one), edge, checks.devices, checks.seconds)
    for name, info in met.items():
        first = next(iter(met))
        for what, mine in _described(info).items():
            if mine != (theirs := _described(met[first])[what]):
                yield f"The servers {name} and {first} differ in their {what}: {mine} and {theirs}."


def _described(info: ServerInfo) -> dict[str, str]:
    """The properties that servers must share, so that a text can continue at another server."""
    return {
        "vocabulary": f"{info.model} ({info.fingerprint[:8]})",
        "model": f"{info.model} ({info.weights[:8]})",
        "execution": info.execution,
        "context": str(info.context_len),
    }


def _ask(console: Console, cloud: Cloud) -> tuple[ServerInfo, float]:
    """Print and return a server's description and its round trip in milliseconds. Raises CloudError."""
    with TERMINAL.state(f"Asking {cloud.name}…"):
        _check_port(cloud)
        info = cloud.info()
        rtt_ms, late_ms = ping_times(cloud)
    encryption = "TLS" if cloud.uses_tls else "plaintext"
    console.print(f"cloud        {cloud.name}, skydraft {info.version}, {encryption}, token accepted or not needed")
    console.print(
        f"             {info.model}, context {info.context_len}, {info.execution}, "
        f"{info.max_rows} rows a forward, {info.num_sessions} of {info.max_sessions} sessions in use"
    )
    console.print(f"round trip   p50 {rtt_ms:.2f} ms, p95 {late_ms:.2f} ms ({NUM_PINGS} health checks)")
    rows = "  ".join(f"{n}: {ms:.1f}" for n, ms in enumerate(info.forward_ms, 1))
    console.print(f"target, ms   {rows}   (a forward of n rows, as the server measured it at its first start)")
    return info, rtt_ms


def _check_port(cloud: Cloud) -> None:
    """Raise CloudLost if nothing listens there: a server that is only slow or starting is worth waiting for."""
    try:
        cloud.ping(_LOOK_S)
    except CloudLost as error:
        if "refused" in error.message:
            raise CloudLost("The connection was refused.", hint="Check the port; is the server running?") from error
    except CloudError:
        pass  # it answers


def _measure_link(console: Console, cloud: Cloud, edge: Engine, info: ServerInfo, rtt_ms: float) -> Iterator[str]:
    try:
        with counted(len(PROMPTS), "prompts over the link") as done:
            report = examine_link(edge, cloud, info, rtt_ms, done)
    except SkydraftError as error:
        yield f"{edge.name} cannot draft for {info.model}: {error.line}"
        return
    costs, alpha, k, even_ms = report.costs, report.alpha, report.best_k, report.break_even_ms
    console.print(
        f"acceptance   {alpha:.2f} per judged draft, {report.tokens_per_round:.2f} tokens a round at k={report.k}, "
        f"{report.bytes_per_token:.1f} bytes a token ({len(PROMPTS)} prompts, {report.num_tokens} tokens)"
    )
    console.print(f"on the link  {report.wire_ms:.2f} ms a round beside the two models' forwards")
    console.print(f"draft model  {costs.draft_ms:.1f} ms a drafted token on this machine")
    console.print(f"\nstreaming    {costs.tokens_per_s(alpha, 0):.1f} tokens/s (mode cloud)")
    console.print(f"speculation  {costs.tokens_per_s(alpha, k):.1f} tokens/s at best, with k = {k}")
    if report.gain > 1:
        pays = f"it pays up to a round trip of {even_ms:.0f} ms"
        console.print(f"verdict      speculation is {report.gain:.2f} times as fast here; {pays}")
    else:
        why = "a faster link would not help: drafting and checking cost more than they save."
        why = f"speculation would pay below a round trip of {even_ms:.1f} ms." if even_ms > 0 else why
        console.print(f"verdict      streaming is faster here ({1 / report.gain:.2f} times); {why}")
        console.print("             A gated mode still saves tokens that the large model writes.")
    show_turns(console, costs)


def _device(choice: CloudChoice, model: str | None = None) -> Cloud:
    """The connection of one of many devices, which never goes on alone."""
    return choice.but(require=True).connect(model).telling(lambda line: None)


def show_turns(console: Console, costs: CostModel) -> None:
    """Print when lossless with --k auto drafts."""
    after = drafts_after(costs)
    if after is None:
        does = "never drafts: the target writes alone"
    elif after:
        tokens = "a token" if after == 1 else f"{after} tokens in a row"
        does = f"drafts once the draft model would have written {tokens} as the target did"
    else:
        does = "drafts from the start"
    console.print(f"lossless     with --k auto it {does}")


def _examine_stock(console: Console, choice: CloudChoice, models: ModelChoice, checks: CheckChoice) -> Iterator[str]:
    """Print findings about a server without skydraft; yields steps for the user."""
    edge = models.load_edge()
    with closing(choice.connect(models.cloud_model)) as cloud:
        try:
            with TERMINAL.state(f"Asking {cloud.name}…"):
                _check_port(cloud)
                facts = cloud.facts(None)
                assert facts is not None
                _, again = _written(edge, cloud), _written(edge, cloud)
        except SkydraftError as error:
            yield f"{cloud.name} cannot be used: {error.line}"
            return
        num_cached, gap_ms = again.stats.cached_tokens.cloud, _gap_ms(again.records)
        encryption = "encrypted" if cloud.uses_tls else "plaintext"
        has_ids = cloud.kind not in ("completions", "chat")
        same = "the same as the draft model's" if has_ids else "compared as text: the server gives no ids"
        console.print(f"cloud        {cloud.name}, {cloud.kind}, {encryption}, key accepted or not needed")
        console.print(f"             {one_line(facts.name)}, not exact: its tokens may depend on other requests")
        console.print(f"tokens       {same}")
        console.print(f"cache        {num_cached} of {again.num_prompt_tokens} tokens of a prompt, the second time")
        console.print(f"round trip   {facts.wire_ms:.1f} ms; a written token {gap_ms:.1f} ms")
        if checks.devices:
            connect = partial(_device, choice, models.cloud_model)
            yield from measure_devices(console, connect, edge, checks.devices, checks.seconds)
    if not num_cached:
        yield "turn on the server's prefix cache, or let it tell of it: without it each call reads the whole text anew"


def _written(edge: Engine, cloud: Cloud) -> Generation:
    """A few tokens that the server writes after a prompt of some hundred tokens."""
    prompt, params = "".join(PROMPTS) * 4, DecodingParams(max_new_tokens=_NUM_WRITTEN)
    return api.generate(prompt, edge=edge, cloud=cloud, plan=make_plan("cloud"), params=params).run()


def _gap_ms(records: Seq[StepRecord]) -> float:
    """Milliseconds from one token of a stream to the next; of a text of one token, all that it took."""
    if len(records) < 2:
        return records[0].ended_ms
    return (records[-1].ended_ms - records[0].ended_ms) / (len(records) - 1)
