"""Tokens a second against the round trip: streaming, fixed blocks, and blocks that end by their risk.

    python -m bench.link [--record] [--prompts 6] [--tokens 40] [--rtt 0,20,60] [--target-ms 45,15] [--threads 1]

The draft model drafts for real. The target is a server that says what was recorded (bench/data/link_verdicts.json, made
with --record by the real one) and waits what is stated for each forward, since both models on two cores would slow each
other; the link is emulated. Rates are those after the first round, which reads the prompt. The theory beside them is
the cost model with the measured acceptance and draft step.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import skydraft
from bench.recorded_target import MAX_ROWS, RecordedServer, Table, record
from bench.workload import load_pair, machine, prompts
from skydraft.config import DecodingParams
from skydraft.decoding.cost_model import CostModel, measured_alpha
from skydraft.decoding.generation import Generation
from skydraft.decoding.plan import Plan, make_plan
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.engines.options import EngineOptions
from skydraft.evaluation.emulated_link import EmulatedLink, LinkShape
from skydraft.models import default_pair

VERDICTS = Path(__file__).parent / "data" / "link_verdicts.json"
ROUND_TRIPS = "0,10,20,40,60,80,120,150"
FIXED = (2, 3, 4, 5, 7)


@dataclass(frozen=True)
class Way:
    """A way to decode. The text of all that are not gated must be the target's."""

    name: str
    plan: Plan
    is_lossless: bool = True


LABELS = {
    "streaming": "streaming (cloud)", "risk": "blocks end by risk", "k auto": "--k auto",
    "quality": "quality (agreement below 1)", "auto": "auto (agreement 0.95 asked)",
}  # fmt: skip
# A gate that lets no token pass: lossless blocks, and never the target alone.
ALWAYS_DRAFTING = make_plan(gate="entropy:0", k="auto")
WAYS = [
    Way("streaming", make_plan("cloud")),
    *(Way(f"k = {k}", make_plan(k=k)) for k in FIXED),
    Way("risk", ALWAYS_DRAFTING),
    Way("k auto", make_plan(k="auto")),
    Way("quality", make_plan("quality"), is_lossless=False),
    Way("auto", make_plan("auto"), is_lossless=False),
]


@dataclass
class Found:
    """Sums over the prompts of one way at one point, without the first round of each."""

    num_tokens: int = 0
    spent_ms: float = 0.0
    drafts: list[tuple[int, int]] = field(default_factory=list)  # (accepted, drafted) of each round
    step_ms: list[float] = field(default_factory=list)
    num_calls: int = 0
    num_other: int = 0  # texts that are not the target's

    def add(self, done: Generation, target_ids: Sequence[int] | None) -> None:
        first, *rest = done.records
        self.num_tokens += sum(each.num_committed for each in rest)
        self.spent_ms += done.records[-1].ended_ms - first.ended_ms
        for each in rest:
            if each.outcome == "verified" and each.num_draft:
                self.num_calls += 1
                self.drafts.append((each.num_accepted, each.num_draft))
                if each.draft.num_passes:
                    self.step_ms.append(each.draft.forward_ms / each.draft.num_passes)
        self.num_other += target_ids is not None and list(done.token_ids) != list(target_ids)

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.num_tokens / max(self.spent_ms, 1e-9)

    @property
    def acceptance(self) -> float:
        return sum(accepted for accepted, _ in self.drafts) / max(sum(drafted for _, drafted in self.drafts), 1)

    def row(self) -> dict[str, Any]:
        return {
            "tokens_per_s": round(self.tokens_per_s, 2), "acceptance": round(self.acceptance, 3),
            "alpha": round(measured_alpha(self.drafts) or 0.0, 3), "num_tokens": self.num_tokens,
            "draft_ms": round(statistics.median(self.step_ms), 2) if self.step_ms else None,
            "mean_k": round(sum(each for _, each in self.drafts) / max(len(self.drafts), 1), 2),
            "calls": self.num_calls, "other": self.num_other,
        }  # fmt: skip


def make_table(num_prompts: int, params: DecodingParams) -> None:
    """Run the real pair once, and keep what the target said after each text that it was shown."""
    table: Table = {}
    edge, cloud = load_pair()
    record(cloud, table)
    for prompt in prompts()[:: max(1, len(prompts()) // num_prompts)][:num_prompts]:
        for plan in {way.plan.mode: way.plan for way in WAYS if way.plan.mode and way.plan.k is not None}.values():
            skydraft.generate(prompt, edge=edge, cloud=cloud, plan=plan, params=params).run()
    VERDICTS.write_text(json.dumps({"target": cloud.fingerprint, "tokens": table}, indent=0) + "\n", encoding="utf-8")
    print(f"{len(table)} rows of the target recorded")


@contextmanager
def link_to(port: int, rtt_ms: float) -> Iterator[tuple[EmulatedLink, Cloud]]:
    with EmulatedLink(("127.0.0.1", port), LinkShape(delay_ms=rtt_ms / 2)) as link:
        cloud = skydraft.connect(link.address, require=True)
        try:
            yield link, cloud
        finally:
            cloud.close()


def write(generation: Generation, link: EmulatedLink, round_trips: tuple[float, ...], num_tokens: int) -> Generation:
    """Run it to its end. Of several round trips each holds for as many tokens as the others."""
    link.reshape(LinkShape(delay_ms=round_trips[0] / 2))
    for index, _ in enumerate(generation, 1):
        link.reshape(
            LinkShape(delay_ms=round_trips[min(index * len(round_trips) // num_tokens, len(round_trips) - 1)] / 2)
        )
    return generation


def measure(
    edge: Engine, port: int, round_trips: tuple[float, ...], asked: list[str], params: DecodingParams, ways: list[Way]
) -> dict[str, Found]:
    """All ways, prompt by prompt, so that each prompt meets the same machine."""
    found = {way.name: Found() for way in ways}
    with link_to(port, round_trips[0]) as (link, cloud):
        for prompt in asked:
            target_ids: Sequence[int] | None = None
            for way in ways:
                begun = skydraft.generate(prompt, edge=edge, cloud=cloud, plan=way.plan, params=params)
                done = write(begun, link, round_trips, params.max_new_tokens)
                target_ids = done.token_ids if target_ids is None else target_ids
                found[way.name].add(done, target_ids if way.is_lossless else None)
    return found


def theory(found: Found, rtt_ms: float, target_ms: float, k: int) -> float:
    """Tokens a second that the cost model expects of blocks of k."""
    model = CostModel(statistics.median(found.step_ms), (target_ms,) * MAX_ROWS, MAX_ROWS, wire_ms=rtt_ms)
    return model.tokens_per_s(measured_alpha(found.drafts) or 0.0, k)


def show(point: dict[str, Any]) -> None:
    rows = point["ways"]
    best = max((name for name in rows if name.startswith("k = ")), key=lambda name: rows[name]["tokens_per_s"])
    print(
        f"\nround trip {point['round_trips']} ms, forward of the target {point['target_ms']:g} ms; best fixed: {best}"
    )
    print(f"{'':<14}{'tokens/s':>9}{'/ best k':>9}{'theory':>8}{'accepted':>10}{'mean k':>8}{'other texts':>13}")
    for name, row in rows.items():
        ratio = row["tokens_per_s"] / rows[best]["tokens_per_s"]
        expected = f"{row['theory']:.1f}" if "theory" in row else ""
        print(
            f"{name:<14}{row['tokens_per_s']:>9.1f}{ratio:>9.2f}{expected:>8}{row['acceptance']:>10.2f}"
            f"{row['mean_k']:>8.1f}{row['other']:>13}"
        )


def draw(points: list[dict[str, Any]], path: Path) -> None:
    """A panel for each forward time of the target, a line for each way."""
    from skydraft.evaluation.report.plots import load_pyplot

    pyplot = load_pyplot()
    times = sorted({point["target_ms"] for point in points}, reverse=True)
    figure, panels = pyplot.subplots(1, len(times), figsize=(5.4 * len(times), 4), layout="constrained", squeeze=False)
    for panel, target_ms in zip(panels[0], times, strict=True):
        mine = [point for point in points if point["target_ms"] == target_ms]
        lines = {
            "best fixed k": lambda rows: max(rows[f"k = {k}"]["tokens_per_s"] for k in FIXED if f"k = {k}" in rows)
        }
        for name, label in LABELS.items():
            if name in mine[0]["ways"]:
                lines[label] = lambda rows, name=name: rows[name]["tokens_per_s"]
        for (label, value), mark in zip(lines.items(), "osD^vP*X", strict=False):
            panel.plot(
                [point["rtt_ms"] for point in mine], [value(point["ways"]) for point in mine], marker=mark, label=label,
                linestyle="--" if "agreement" in label else "-", markersize=4,
            )  # fmt: skip
        panel.set(title=f"forward of the target {target_ms:g} ms", xlabel="round trip, ms", ylim=(0, None))
    panels[0][0].set_ylabel("tokens/s")
    panels[0][-1].legend(fontsize=8)
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="make the table of verdicts anew, with the real target")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1, help="of the draft model; link and server need a core")
    parser.add_argument(
        "--rtt", default=ROUND_TRIPS, help='round trips, ms; "10>120>10" is one that changes within each text'
    )
    parser.add_argument("--target-ms", default="45,15")
    parser.add_argument("--ways", default="", help="names of ways, with ';' between them (default: all)")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--plot", type=Path, help="draw them too, as an SVG file")
    asked = parser.parse_args()
    params = DecodingParams(max_new_tokens=asked.tokens)
    if asked.record:
        make_table(asked.prompts, params)
    chosen = prompts()[:: max(1, len(prompts()) // asked.prompts)][: asked.prompts]
    ways = [way for way in WAYS if not asked.ways or way.name in asked.ways.split(";")]
    print(machine())
    points = []
    with skydraft.load(default_pair().draft, EngineOptions(num_threads=asked.threads)) as edge:
        for target_ms in map(float, asked.target_ms.split(",")):
            with RecordedServer(VERDICTS, target_ms) as server:
                for wanted in asked.rtt.split(","):
                    round_trips = tuple(map(float, wanted.split(">")))
                    found = measure(edge, server.port, round_trips, chosen, params, ways)
                    rows = {name: each.row() for name, each in found.items()}
                    for k in FIXED:
                        if (name := f"k = {k}") in rows:
                            mean_ms = statistics.mean(round_trips)
                            rows[name]["theory"] = round(theory(found[name], mean_ms, target_ms, k), 2)
                    point = {"rtt_ms": round_trips[0], "round_trips": wanted, "target_ms": target_ms, "ways": rows}
                    points.append(point)
                    show(points[-1])
                    if asked.out:
                        asked.out.write_text(json.dumps({"machine": machine(), "points": points}, indent=1) + "\n")
    if asked.plot:
        draw(points, asked.plot)


if __name__ == "__main__":
    main()
