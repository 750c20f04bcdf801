"""Texts of one device over a link as turns that a simulation of many devices replays, and what the link and the server
cost in them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from skydraft import api
from skydraft.config import DecodingParams
from skydraft.decoding.cost_model import CostModel
from skydraft.decoding.generation import Generation
from skydraft.decoding.plan import Plan, make_plan
from skydraft.decoding.turns import run_of
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.errors import CloudLost, OptionError
from skydraft.evaluation.devices import Load, Simulation, Text, Turn, most_devices
from skydraft.evaluation.diagnosis import PROMPTS
from skydraft.gating.hand_back import HandBack
from skydraft.protocol.values import ServerInfo
from skydraft.types import LinkCost, StepRecord

STREAM, DRAFTED = "cloud", "lossless --k 5"
MODES = {
    STREAM: make_plan("cloud"), DRAFTED: make_plan("lossless", k=5), "quality": make_plan("quality"),
    "auto": make_plan("auto"),
}  # fmt: skip
_NUM_TOKENS = 48
_MOST_ROWS = 4096


def text_of(done: Generation, *, num_unread: int | None = None) -> Text:
    """What a finished generation over a link did.

    With `num_unread` the server was one without skydraft that had so many tokens of the prompt not in its cache.
    """
    plan, turns, before, reads = done.request.plan, list[Turn](), Turn(0.0), list[float]()
    hand_back, run = plan.hand_back or HandBack(), 0
    for each in done.rounds_so_far:
        record = each.record
        edge_ms = record.wall_ms - record.link.rtt_ms
        run = run_of(each.block.read, run)
        if turns and hand_back.reads and run >= hand_back.agreed:
            turns[-1] = replace(turns[-1], stops=True)  # what is written after this crosses the stop
        if record.outcome == "verified":
            turn = replace(before, edge_ms=before.edge_ms + edge_ms, num_tokens=record.num_committed)
            if num_unread is None:
                turns.append(_asked(turn, record))
            else:
                turns.append(_asked_stock(turn, record, turn.num_skipped + (1 if turns else num_unread)))
            before, run, reads = Turn(0.0), 0, []
        elif record.outcome == "written":
            reads.append(edge_ms)
            num_on = turns[-1].num_on + (not turns[-1].stops)
            turns[-1] = replace(turns[-1], num_on=num_on, read_ms=statistics.mean(reads))
        else:
            num_skipped = before.num_skipped + record.num_committed
            before = replace(before, edge_ms=before.edge_ms + edge_ms, num_skipped=num_skipped)
    if turns and not before.num_skipped:
        turns[-1] = replace(turns[-1], closes=False)  # the server ends the text itself
    turns += [before] if before.num_skipped else []
    prefill_ms = sum(record.target.prefill_ms for record in done.records)
    return Text(tuple(turns), done.num_prompt_tokens, prefill_ms, plan.drafts and not plan.is_gated)


def _num_unread(done: Generation) -> int:
    """How many tokens of a stream's prompt a server without skydraft read, as far as it tells what was in its cache."""
    link = sum((record.link for record in done.records), LinkCost())
    return link.tokens_in - link.tokens_hit if 0 < link.tokens_hit < link.tokens_in else done.num_prompt_tokens


def _asked(turn: Turn, record: StepRecord) -> Turn:
    """A turn with the rows of a verdict; tokens that were skipped before are rows of it too."""
    rows, needed = (record.num_audited + num + 1 for num in (record.num_draft, record.num_accepted))
    return replace(turn, num_rows=rows, num_needed=needed)


def _asked_stock(turn: Turn, record: StepRecord, num_new: int) -> Turn:
    """A turn at a server that reads `num_new` tokens as rows of a step, and then writes what it checks.

    Where it checks a draft in one request, each choice along the draft is a row more instead.
    """
    num_passes, num_rows = record.target.num_passes, num_new + record.target.num_rows - record.target.num_passes
    return replace(
        turn, num_rows=num_rows, num_read=num_new - 1, num_needed=num_rows, num_checked=num_passes - 1, closes=True
    )  # fmt: skip


def judging_ms(turn: Turn, costs: CostModel) -> float:
    """Time of the forwards for a verdict, on a server that does nothing else."""
    starts = range(0, max(turn.num_needed, 1), costs.max_rows)
    return sum(costs.pass_ms(min(costs.max_rows, turn.num_rows - start)) for start in starts)


def measured_costs(streams: Iterable[Generation], drafted: Iterable[Generation], info: ServerInfo) -> CostModel:
    """The server's costs now: its own times, scaled and shifted to those of streams; what else a call takes is wire.

    `streams` are texts of mode cloud, `drafted` those of lossless, all over this link without other load.
    """
    gap_ms, inside_ms, num = 0.0, 0.0, 0
    for records in (done.records for done in streams):
        gap_ms += records[-1].ended_ms - records[0].ended_ms
        inside_ms += sum(record.target.forward_ms for record in records[1:])
        num += len(records) - 1
    forward_ms = info.forward_ms
    if num and inside_ms:
        beside_ms, slowdown = max(gap_ms - inside_ms, 0.0) / num, inside_ms / num / max(forward_ms[0], 1e-3)
        forward_ms = tuple(ms * slowdown + beside_ms for ms in forward_ms)
    costs = CostModel(0.0, forward_ms, info.max_rows, streams=True)
    beside = [
        record.link.rtt_ms - judging_ms(turn, costs)
        for done in drafted
        for turn, record in list(zip(text_of(done).turns, done.records, strict=True))[1:]
    ]
    return replace(costs, wire_ms=max(statistics.median(beside), 0.0) if beside else 0.0)


def _line(rows: Seq[int], times: Seq[float]) -> tuple[float, ...]:
    """Milliseconds of 1, 2, … rows: a line between those that are known."""
    return tuple(np.interp(range(1, rows[-1] + 1), rows, times).tolist())


def parse_forward_ms(text: str) -> tuple[float, ...]:
    """`1:6.5,8:6.6,32:7.2`: milliseconds of forwards of 1, 8 and 32 rows; between them a line. Raises OptionError."""
    try:
        points = sorted((int(rows), float(ms)) for rows, ms in (each.split(":") for each in text.split(",")))
    except ValueError:
        points = []
    rows, times = [at for at, _ in points], [ms for _, ms in points]
    if not points or not 1 <= rows[0] <= rows[-1] <= _MOST_ROWS or not all(0 < ms < math.inf for ms in times):
        raise OptionError(
            f"--forward-ms '{text}' has no times of forwards.", hint='For example --forward-ms "1:6.5,8:6.6,32:7.2".'
        )
    return _line(rows, times)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Texts by mode as one device wrote them over a link, the costs that this showed, and what was refused."""

    texts: Mapping[str, Seq[Text]]
    costs: CostModel
    refused: Mapping[str, str]
    is_stock: bool = False

    def with_times(self, forward_ms: tuple[float, ...]) -> Recorded:
        """The same at a server with these times of forwards, where a prompt takes the time of as many rows."""
        most = _MOST_ROWS if self.is_stock else len(forward_ms)
        costs = replace(self.costs, forward_ms=forward_ms, max_rows=most, reading_ms=())
        if self.is_stock:  # prompts are rows there
            return replace(self, costs=costs)
        texts = {
            mode: [replace(text, prefill_ms=costs.pass_ms(max(text.prompt_len - 1, 1))) for text in each]
            for mode, each in self.texts.items()
        }
        return replace(self, texts=texts, costs=costs)


def record(
    edge: Engine, cloud: Cloud, info: ServerInfo, prompts: Seq[str] = PROMPTS, num_tokens: int = _NUM_TOKENS
) -> Recorded:
    """Answer the prompts in each mode, greedily. Raises SkydraftError."""
    found, refused = _written(edge, cloud, MODES, prompts, num_tokens)
    costs = measured_costs(found[STREAM], found[DRAFTED], info)
    return Recorded({mode: [text_of(done) for done in each] for mode, each in found.items()}, costs, refused)


def _written(
    edge: Engine, cloud: Cloud, modes: Mapping[str, Plan], prompts: Seq[str], num_tokens: int
) -> tuple[dict[str, list[Generation]], dict[str, str]]:
    """Texts by mode, and why modes were refused. Raises a SkydraftError, also where a text went on alone."""
    found, refused, params = dict[str, list[Generation]](), dict[str, str](), DecodingParams(max_new_tokens=num_tokens)
    for mode, plan in modes.items():
        try:
            texts = [api.generate(each, edge=edge, cloud=cloud, plan=plan, params=params).run() for each in prompts]
        except OptionError as error:
            refused[mode] = error.line
            continue
        if any("edge-fallback" in done.origins for done in texts):
            raise CloudLost(f"In mode {mode} a text went on without the server.")
        found[mode] = texts
    return found, refused


def table(replay: Recorded, num_devices: int) -> Iterator[str]:
    """Lines of text: what each of 1, 2, 4, ... `num_devices` devices gets, by mode, and how many get half the speed."""
    loads = {mode: cache(partial(_load, texts, replay.costs)) for mode, texts in replay.texts.items()}
    yield " " * 8 + "".join(f"{mode:<22}" for mode in loads).rstrip()
    for num in sorted({*itertools.takewhile(num_devices.__gt__, (2**n for n in range(30))), num_devices}):
        cells = (load(num) for load in loads.values())
        yield f"  {num:<6}" + "".join(f"{cell(each):<22}" for each in cells).rstrip()
    most = {mode: most_devices(load, num_devices) for mode, load in loads.items()}
    counts = ", ".join(f"{mode} {num}{' or more' * (num == num_devices)}" for mode, num in most.items())
    yield f"Simulated: at least half the speed of one device alone get, in mode {counts}."


def cell(load: Load) -> str:
    """Tokens a second of a device, p95 of its waits, and the share of the server's time."""
    return f"{load.tokens_per_s:>5.1f} {load.wait_ms or 0.0:>6.0f} ms {100 * load.busy:>3.0f} %"


def _load(texts: Seq[Text], costs: CostModel, num_devices: int) -> Load:
    return Simulation(texts, costs, num_devices).run()
