import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import closing
from dataclasses import dataclass

from rich.console import Console

from skydraft import api
from skydraft.characters import one_line
from skydraft.cli.pair_options import CloudChoice, ModelChoice
from skydraft.cli.progress import counted
from skydraft.cli.terminal import TERMINAL
from skydraft.config import DecodingParams
from skydraft.decoding.cost_model import CostModel
from skydraft.decoding.generation import Generation
from skydraft.decoding.plan import make_plan
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.errors import CloudError, CloudLost, OptionError, SkydraftError
from skydraft.evaluation.comparison import drafting, request_of
from skydraft.evaluation.devices import KeptRows, Load, measure_load
from skydraft.evaluation.diagnosis import NUM_PINGS, PROMPTS, drafts_after, examine_link, ping_times
from skydraft.evaluation.modes import parse_modes
from skydraft.evaluation.records import PromptEntry
from skydraft.protocol.address import is_url, parse_addresses
from skydraft.protocol.values import ServerInfo
from skydraft.types import StepRecord

_LOOK_S = 3.0  # for the first sign of life
_NUM_WRITTEN = 16  # tokens that a server without skydraft writes to show what it can
_NUM_TIMED = 32  # tokens of a prompt in each mode
_LONG_S = 30.0  # of these texts together
_CLEARLY = 1.1  # a ratio of speeds that a few prompts tell from none
# Of devices. The second drafts all along the text, so that rows are recorded which lossless drafts only under load.
_MODES = "cloud,lossless;k=5,lossless,quality,auto,auto;gate=calibrated:0.9"
_ASKED = (0.95, 0.9)  # agreements
_BUSY = 0.8  # of a core; Python uses no more than one


@dataclass(frozen=True, slots=True)
class CheckChoice:
    """What to measure: nothing, which loads no model, or also what `devices` get in `seconds` of each mode. They write
    answers to `prompts`, of up to `max_new_tokens` where a task does not say how many."""

    no_measure: bool
    probe_again: bool
    devices: int | None
    seconds: float
    prompts: Seq[PromptEntry] = tuple(PromptEntry(id=prompt, prompt=prompt) for prompt in PROMPTS)
    max_new_tokens: int = 32


def examine_cloud(console: Console, choice: CloudChoice, models: ModelChoice, checks: CheckChoice) -> Iterator[str]:
    """Print findings about each server; yields steps for the user."""
    if is_url(choice.address or ""):
        if checks.no_measure:
            raise OptionError("--no-measure does not apply to a server without skydraft.", hint="Leave it out.")
        yield from _examine_stock(console, choice, models, checks)
        return
    edge: Engine | None = None
    met: dict[str, ServerInfo] = {}
    for address in parse_addresses(choice.address or ""):
        one = choice.but(address)
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
                yield from _measure_devices(console, one, None, edge, checks)
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
    console.print(f"cloud        {cloud.name}, skydraft {info.version}, {encryption}")
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
    console.print(
        f"draft model  {costs.draft_ms:.1f} ms a drafted token on this machine; the target's forwards take "
        f"{costs.slowdown:.2f} times what is above"
    )
    console.print(f"\nstreaming    {costs.tokens_per_s(alpha, 0):.1f} tokens/s (mode cloud), by these times")
    console.print(f"speculation  {costs.tokens_per_s(alpha, k):.1f} tokens/s at best, with k = {k}")
    if report.gain > 1:
        pays = f"it pays up to a round trip of {even_ms:.0f} ms"
        console.print(f"verdict      speculation is {report.gain:.2f} times as fast here; {pays}")
    else:
        why = "a faster link would not help: drafting and checking cost more than they save."
        why = f"speculation would pay below a round trip of {even_ms:.1f} ms." if even_ms > 0 else why
        console.print(f"verdict      streaming is faster here ({1 / report.gain:.2f} times); {why}")
        console.print("             Mode quality has the same text, and the large model writes only a part of it.")
    show_turns(console, costs)


def show_turns(console: Console, costs: CostModel) -> None:
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
        console.print(f"cloud        {cloud.name}, {cloud.kind}, {encryption}")
        console.print(f"             {one_line(facts.name)}, not exact: its tokens may depend on other requests")
        console.print(f"tokens       {same}")
        console.print(f"cache        {num_cached} of {again.num_prompt_tokens} tokens of a prompt, the second time")
        console.print(f"round trip   {facts.wire_ms:.1f} ms; a written token {gap_ms:.1f} ms")
        gated = ("auto", "fluency") if api.is_calibrated(edge, cloud) else ("fluency",)
        try:
            _show_speeds(console, _speeds(edge, cloud, ("cloud", *gated)))
        except SkydraftError as error:
            yield f"the modes were not timed to the end: {error.line}"
        if "auto" not in gated:
            console.print("             For auto there is no calibration of this pair; generate --mode auto says more.")
        yield from _measure_devices(console, choice, models.cloud_model, edge, checks)
    if not num_cached:
        yield "turn on the server's prefix cache, or let it tell of it: without it each call reads the whole text anew"


def _written(edge: Engine, cloud: Cloud) -> Generation:
    """A few tokens that the server writes after a prompt of some hundred tokens."""
    prompt, params = "".join(PROMPTS) * 4, DecodingParams(max_new_tokens=_NUM_WRITTEN)
    return api.generate(prompt, edge=edge, cloud=cloud, plan=make_plan("cloud"), params=params).run()


def _speeds(edge: Engine, cloud: Cloud, modes: Seq[str]) -> dict[str, float]:
    """Tokens a second in each mode. They take turns, prompt by prompt, so a busy moment slows them all; with a slow
    server there are fewer prompts."""
    tokens, seconds = dict.fromkeys(modes, 0), dict.fromkeys(modes, 0.0)
    params = DecodingParams(max_new_tokens=_NUM_TIMED)
    with counted(len(PROMPTS), "prompts in each mode") as done:
        for prompt in PROMPTS:
            if sum(seconds.values()) > _LONG_S:
                break
            for mode in modes:
                began = time.perf_counter()
                text = api.generate(prompt, edge=edge, cloud=cloud, plan=make_plan(mode), params=params).run()
                seconds[mode] += time.perf_counter() - began
                tokens[mode] += len(text.token_ids)
            done()
    return {mode: tokens[mode] / seconds[mode] for mode in modes}


def _show_speeds(console: Console, speeds: dict[str, float]) -> None:
    streaming = speeds.pop("cloud")
    others = ", ".join(f"{mode} {speed:.1f}" for mode, speed in speeds.items())
    console.print(
        f"speed        quality (it streams) {streaming:.1f} tokens/s, {others} "
        f"(short texts, up to {_NUM_TIMED} tokens each)"
    )
    best = max(speeds, key=lambda mode: speeds[mode])
    gain = speeds[best] / streaming
    verdict = "streaming is about as fast here"
    if gain > _CLEARLY:
        verdict = f"{best} is {gain:.2f} times as fast as streaming here"
    elif gain < 1 / _CLEARLY:
        verdict = f"streaming is faster here ({1 / gain:.2f} times as fast as {best})"
    console.print(f"verdict      {verdict}; in {' and '.join(speeds)} the server writes less, and not the same text")


def _gap_ms(records: Seq[StepRecord]) -> float:
    """Milliseconds from one token of a stream to the next; of a text of one token, all that it took."""
    if len(records) < 2:
        return records[0].ended_ms
    return (records[-1].ended_ms - records[0].ended_ms) / (len(records) - 1)


def _measure_devices(
    console: Console, choice: CloudChoice, model: str | None, edge: Engine, checks: CheckChoice
) -> Iterator[str]:
    """Print what each mode gives as many devices as were asked for, if any; yields steps for the user."""
    num, loads = checks.devices, list[Load]()
    if not num:
        return
    device = choice.but(require=True)  # it never goes on alone
    params = DecodingParams(max_new_tokens=checks.max_new_tokens)
    modes = parse_modes(_MODES, lambda _: params)
    try:
        draft = drafting(edge, (request_of(prompt, modes[0]) for prompt in checks.prompts))
    except SkydraftError as error:
        yield f"the devices were not measured: {error.line}"
        return

    def connect() -> Cloud:
        return device.connect(model).telling(lambda line: None)

    _show_devices(console, draft, checks)
    with closing(KeptRows(draft)) as kept:
        for mode in modes:
            try:
                with TERMINAL.state(f"{num} devices in mode {mode.name}…"):
                    load = measure_load(connect, kept, mode, checks.prompts, num, checks.seconds)
            except OptionError as error:
                console.print(f"             not measured: mode {mode.name}: {error.message}")
                continue
            except SkydraftError as error:
                yield f"the devices were not measured to the end: {error.line}"
                break
            loads.append(load)
            console.print(
                f"             {mode.name:<26}{_cell(load.agreement, '.3f'):>9}{load.tokens_per_s:>10.1f}"
                f"{load.tokens_per_s / num:>9.1f}{_cell(load.wait_ms, '.1f', ' ms'):>12}"
                f"{_cell(load.late_ms, '.1f', ' ms'):>12}{_ratio(load, loads[0]):>14}"
            )
        else:
            if not all(load.tokens_per_s for load in loads):
                yield "nothing came in some modes, perhaps for lack of time: give more with --seconds"
            if not loads:
                yield "no mode was measured with these devices"
    for remark in _remarks(loads):
        console.print(f"             {remark}")


def _show_devices(console: Console, draft: Engine, checks: CheckChoice) -> None:
    learned = f" with {draft.adapter}" if draft.adapter else ""
    console.print(
        f"\ndevices      {checks.devices} at once, {checks.seconds:g} s in each mode, "
        f"text after text of {len(checks.prompts)} prompts\n"
        "             Real: the server, the link, and each device's connection, requests and waits.\n"
        f"             Recorded: what the draft model says{learned}; a step takes "
        f"{draft.profile.forward_ms[0]:.1f} ms, as on this machine.\n"
        f"             {'mode':<26}{'agreement':>9}{'tokens/s':>10}{'of each':>9}{'wait p50':>12}{'p95':>12}"
        f"{'/ streaming':>13}"
    )


def _cell(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def _remarks(loads: Seq[Load]) -> Iterator[str]:
    for asked in _ASKED:
        if keeping := [load for load in loads if (load.agreement or 0) >= asked]:
            best = max(keeping, key=lambda load: load.tokens_per_s)
            yield f"At an agreement of {asked:g} or more it carries most in mode {best.mode}."
    if any(load.busy > _BUSY for load in loads):
        yield "This machine was busy with being so many devices: the server may carry more."
    if num_computed := sum(load.num_computed for load in loads):
        yield f"The draft model computed {num_computed} tokens meanwhile that were not recorded."


def _ratio(load: Load, first: Load) -> str:
    return f"{load.tokens_per_s / first.tokens_per_s:.2f}" if first.mode == "cloud" and first.tokens_per_s else ""
