"""Tokens a second against the round trip: streaming, fixed blocks, and modes in which the target writes on.

    python -m bench link [--prompts 4] [--tokens 60] [--rtt 0,20,60] [--target-ms 45] [--threads 1]

The draft model drafts for real. The target is a server that says what the real one said before and waits what is stated
for each forward, since both models on two cores would slow each other; the link is emulated. Each setting runs until a
text came twice in a row, and the last run counts: what was never said before takes longer. Rates are those after the
first round, which reads the prompt. Each kind of prompt (Chinese text, code, copying) has as many. The theory beside
fixed blocks is the cost model with the measured acceptance and draft step.
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import skydraft
from bench.emulated_link import EmulatedLink, LinkShape
from bench.recorded_target import MAX_ROWS, RecordedServer
from bench.workload import machine, prompts
from skydraft.config import DecodingParams
from skydraft.decoding.cost_model import CostModel
from skydraft.decoding.generation import Generation
from skydraft.decoding.plan import Plan, make_plan
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.engines.options import EngineOptions
from skydraft.models import default_pair

DATA = Path(__file__).parent.parent / "data"
ROUND_TRIPS = "20,80,150"
FIXED = (2, 5)
MAX_RUNS = 5  # of a gated text, which may be another one each time
COPYING = (
    "把下面这段话原样再写一遍，只改正其中的一个错字：清晨的海边很安静，渔民们已经开始整理鱼网，海鸥在远处盘旋，"
    "第一缕阳光照在湿闰的沙滩上，孩子们赤着脚奔跑，笑声随着海风飘得很远。",
    "Rename the variable x to total in this function and print the whole function again, nothing else:\n\n"
    "def average(values):\n    x = 0\n    for value in values:\n        x = x + value\n    if not values:\n"
    "        raise ValueError('no values')\n    return x / len(values)\n",
    "把下面的列表原样改写成 JSON 数组：苹果三斤，香蕉两斤，橘子五斤，葡萄一斤，西瓜十斤，梨四斤。",
    "Copy this text and correct nothing: The quick brown fox jumps over the lazy dog while the sun sets slowly behind "
    "the hills, and the farmer closes the gate of the old barn.",
)


@dataclass(frozen=True)
class Way:
    """A way to decode. The text of all that are not gated must be the target's."""

    name: str
    plan: Plan
    is_lossless: bool = True


# A gate that lets no token pass: lossless blocks, and never the target alone.
ALWAYS_DRAFTING = make_plan(gate="entropy:0")
WAYS = [
    Way("streaming", make_plan("cloud")),
    *(Way(f"k = {k}", make_plan(k=k)) for k in FIXED),
    Way("risk", ALWAYS_DRAFTING),
    Way("k auto", make_plan()),
    Way("quality", make_plan("quality")),
    Way("auto", make_plan("auto"), is_lossless=False),
    Way("auto, 0", make_plan("auto", k=12, hand_back="0"), is_lossless=False),
]


def measured_alpha(blocks: Sequence[tuple[int, int]]) -> float:
    """Accepted drafts per judged draft, from (accepted, drafted) of blocks: judging ends at the first difference."""
    num_judged = sum(min(accepted + 1, drafted) for accepted, drafted in blocks)
    return sum(accepted for accepted, _ in blocks) / max(num_judged, 1)


@dataclass
class Found:
    """Sums over the prompts of one way at one point, without the first round of each."""

    num_tokens: int = 0
    spent_ms: float = 0.0
    drafts: list[tuple[int, int]] = field(default_factory=list)  # (accepted, drafted) of each round
    step_ms: list[float] = field(default_factory=list)
    num_calls: int = 0
    num_written: int = 0
    num_other: int = 0  # texts that are not the target's

    def add(self, done: Generation, target_ids: Sequence[int] | None) -> None:
        first, *rest = done.records
        self.num_tokens += sum(each.num_committed for each in rest)
        self.spent_ms += done.records[-1].ended_ms - first.ended_ms
        for each in rest:
            self.num_calls += each.outcome == "verified"
            self.num_written += each.num_written
            if each.outcome == "verified" and each.num_draft:
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
            "alpha": round(measured_alpha(self.drafts), 3), "num_tokens": self.num_tokens,
            "draft_ms": round(statistics.median(self.step_ms), 2) if self.step_ms else None,
            "mean_k": round(sum(each for _, each in self.drafts) / max(len(self.drafts), 1), 2),
            "calls": round(self.num_calls / max(self.num_tokens, 1), 3), "other": self.num_other,
            "written": round(self.num_written / max(self.num_tokens, 1), 3),
        }  # fmt: skip


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
    edge: Engine, port: int, round_trips: tuple[float, ...], asked: dict[str, list[str]], params: DecodingParams,
    ways: list[Way],
) -> dict[str, dict[str, Found]]:  # fmt: skip
    """By kind of prompt, all ways: prompt by prompt, so that each prompt meets the same machine."""
    found = {kind: {way.name: Found() for way in ways} for kind in asked}
    with link_to(port, round_trips[0]) as (link, cloud):
        for kind, prompt in [(kind, prompt) for kind, mine in asked.items() for prompt in mine]:
            target_ids: Sequence[int] | None = None
            for way in ways:
                before: Sequence[int] | None = None
                for _ in range(MAX_RUNS):
                    begun = skydraft.generate(prompt, edge=edge, cloud=cloud, plan=way.plan, params=params)
                    done = write(begun, link, round_trips, params.max_new_tokens)
                    target_ids = done.token_ids if target_ids is None else target_ids
                    if done.token_ids == before:
                        break
                    before = done.token_ids
                found[kind][way.name].add(done, target_ids if way.is_lossless else None)
    return found


def chosen(num: int) -> dict[str, list[str]]:
    """So many prompts of each kind."""
    dev = prompts()
    lines = (DATA / "prompts_long_dev.jsonl").read_text(encoding="utf-8").splitlines()
    code = [each["prompt"] for each in map(json.loads, lines) if each["category"] == "long-code"]
    return {
        "text": dev[:: max(1, len(dev) // num)][:num], "code": code[:: max(1, len(code) // num)][:num],
        "copying": list(COPYING[:num]),
    }  # fmt: skip


def theory(found: Found, rtt_ms: float, target_ms: float, k: int) -> float:
    """Tokens a second that the cost model expects of blocks of k."""
    model = CostModel(statistics.median(found.step_ms), (target_ms,) * MAX_ROWS, MAX_ROWS, wire_ms=rtt_ms)
    return model.tokens_per_s(measured_alpha(found.drafts), k)


def show(point: dict[str, Any]) -> None:
    rows = point["ways"]
    plain = rows["streaming"]["tokens_per_s"]
    print(f"\n{point['kind']}, round trip {point['round_trips']} ms, forward of the target {point['target_ms']:g} ms")
    print(f"{'':<12}{'tokens/s':>9}{'/ stream':>9}{'theory':>8}{'accepted':>10}{'mean k':>8}{'calls':>8}{'written':>9}"
          f"{'step, ms':>10}{'other texts':>13}")  # fmt: skip
    for name, row in rows.items():
        expected = f"{row['theory']:.1f}" if "theory" in row else ""
        print(
            f"{name:<12}{row['tokens_per_s']:>9.1f}{row['tokens_per_s'] / plain:>9.2f}{expected:>8}"
            f"{row['acceptance']:>10.2f}{row['mean_k']:>8.1f}{row['calls']:>8.3f}{row['written']:>9.2f}"
            f"{row['draft_ms'] or 0:>10.1f}{row['other']:>13}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4, help="of each kind")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1, help="of the draft model; link and server need a core")
    parser.add_argument(
        "--rtt", default=ROUND_TRIPS, help='round trips, ms; "10>120>10" is one that changes within each text'
    )
    parser.add_argument("--target-ms", type=float, default=45.0)
    parser.add_argument("--ways", default="", help="names of ways, with ';' between them (default: all)")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    asked = parser.parse_args()
    params, target_ms = DecodingParams(max_new_tokens=asked.tokens), asked.target_ms
    ways = [way for way in WAYS if not asked.ways or way.name in asked.ways.split(";")]
    print(machine())
    points = []
    options = EngineOptions(num_threads=asked.threads)
    with skydraft.load(default_pair().draft, options) as edge, RecordedServer(target_ms) as server:
        for wanted in asked.rtt.split(","):
            round_trips = tuple(map(float, wanted.split(">")))
            found = measure(edge, server.port, round_trips, chosen(asked.prompts), params, ways)
            for kind, by_way in found.items():
                rows = {name: each.row() for name, each in by_way.items()}
                for k in FIXED:
                    if (name := f"k = {k}") in rows:
                        rows[name]["theory"] = round(
                            theory(by_way[name], statistics.mean(round_trips), target_ms, k), 2
                        )
                points.append(
                    {
                        "kind": kind, "rtt_ms": round_trips[0], "round_trips": wanted, "target_ms": target_ms,
                        "ways": rows,
                    }
                )  # fmt: skip
                show(points[-1])
            if asked.out:
                command = f"python -m bench link {shlex.join(sys.argv[1:])}"
                content = {"command": command, "machine": machine(), "points": points}
                asked.out.write_text(json.dumps(content, indent=1) + "\n")
