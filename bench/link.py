"""The race over a link against the stream of the same target: by kind of work, round trip, and models' speed.

    python -m bench link [--rtt 0,20,80,150] [--speeds 25:45,8:35] [--rows free] [--prompts 10] [--out FILE]
    python -m bench link --many 16      # devices at one target, in units of as many streams
    python -m bench link --modes auto,quality --prompts 3 --kinds zh,code,edits --rtt 20,80 --threads 2

Server, link and edge are real, in two processes; both models only wait: what they say was recorded before, by the demo
pair (`--texts`, made where it is missing: half an hour on a core). --speeds are ms of a step of the draft model and of
a forward of the target with one row; --rows says what more rows cost. Rates count from the first token on, when both
have read the prompt. `first text` counts from the request on, with a device that reads a token of the prompt in 0.3 of
a step. `rounds` are `--k N` with the N that is best in hindsight. Each text has to be the stream's. With --modes both
models are the real ones, whose rows are computed once and kept, and texts have 48 tokens.
"""

import argparse
import dataclasses
import itertools
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import skydraft
from bench.emulated_link import EmulatedLink, LinkShape
from bench.recorded_draft import RecordedDraft
from bench.recorded_target import MAX_ROWS, KeptChoices, RecordedServer, RecordedText, Recording, read_texts
from bench.workload import PROMPTS_FILE, load_pair, machine
from skydraft.config import DecodingParams
from skydraft.decoding.plan import Plan, make_plan
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.engines.options import EngineOptions
from skydraft.models import default_pair

MAX_RUNS = 5  # of a text in a gated mode, until it comes twice: rows that were never asked for take longer
# A forward of n rows, in units of one row.
ROWS = {
    "free": {1: 1.0},
    "CUDA7B": {1: 1.0, 3: 1.18, 6: 1.6, 16: 1.98, 32: 2.53, 64: 3.11},  # NOTES.md, "On a GPU": 7B, Q8_0, one H200
}
MANY_ROWS, MANY_MS, MANY_RTT = 48, 36.0, 20.0  # of one row; of the round trip
WARM_S, MANY_S = 4.0, 20.0
FURTHER_ROW = 0.3  # of a step of the draft model, for each row or token of a prompt after the first
LONGEST = 16  # drafts of a round
SHORT = 48  # tokens of a text with the real draft model
LENGTHS = {"zh": 128, "everyday": 128, "code": 128, "zh-long": 400, "edits": 128}  # tokens
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


def asked() -> dict[str, list[str]]:
    """The prompts of each kind of work."""

    def of(name: str, category: str = "") -> list[str]:
        lines = (PROMPTS_FILE.parent / name).read_text(encoding="utf-8").splitlines()
        return [each["prompt"] for each in map(json.loads, lines) if category in ("", each["category"])]

    long = partial(of, "prompts_long_dev.jsonl")
    return {
        "zh": of(PROMPTS_FILE.name)[::6][:10], "everyday": of("prompts_everyday.jsonl")[::5][:6],
        "code": long("long-code")[::2][:4], "zh-long": long("long")[::3][:3], "edits": [*COPYING],
    }  # fmt: skip


def recorded(path: Path, num: int, threads: int) -> list[RecordedText]:
    """The first `num` texts of each kind; the demo pair writes what the file does not have yet."""
    wanted = [(kind, prompt) for kind, prompts in asked().items() for prompt in prompts[:num]]
    known = {(text.kind, text.prompt): text for text in read_texts(path)}
    if missing := [each for each in wanted if each not in known]:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft, target = load_pair(EngineOptions(num_threads=threads))
        with closing(draft), closing(target), path.open("a", encoding="utf-8") as file:
            for each in missing:
                known[each] = record(*each, draft, target)
                print(json.dumps(dataclasses.asdict(known[each])), file=file, flush=True)
    return [known[each] for each in wanted]


def record(kind: str, prompt: str, draft: Engine, target: Engine) -> RecordedText:
    params = DecodingParams(max_new_tokens=LENGTHS[kind])
    done = skydraft.generate(prompt, cloud=target, plan=make_plan("cloud"), params=params).run()
    prompt_ids, target_ids = [*done.request.prompts.edge.token_ids], [*done.token_ids]
    with closing(draft.open(prompt_ids)) as sequence:
        fed = [prompt_ids[-1], *target_ids[:-1]]  # row by row: the bits of a step
        draft_ids = [int(np.argmax(sequence.extend([token_id])[0])) for token_id in fed]
    return RecordedText(kind, prompt, prompt_ids, target_ids, draft_ids)


@dataclass(frozen=True, slots=True)
class Figures:
    """Sums over texts, from the first token of each on; `whole_ms` from the request on. Drafts are `sent`, and `judged`
    once they are in a forward."""

    tokens: int = 0
    spent_ms: float = 0.0
    whole_ms: float = 0.0
    forwards: int = 0
    sent: int = 0
    judged: int = 0
    accepted: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def __add__(self, other: "Figures") -> "Figures":
        return Figures(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def row(self, stream: "Figures") -> dict[str, float]:
        """Speeds in units of the stream's, and figures a token."""
        num, names = max(self.tokens, 1), ("spent_ms", "forwards", "sent", "bytes_up", "bytes_down")
        return {
            "speed": round(stream.spent_ms / stream.tokens * num / self.spent_ms, 3),
            "whole": round(stream.whole_ms / stream.tokens * num / self.whole_ms, 3), "tokens": self.tokens,
            "accepted": round(self.accepted / max(self.judged, 1), 3),
            **{name: round(getattr(self, name) / num, 3) for name in names},
        }  # fmt: skip


def timed(
    prompt: str, plan: Plan, num_tokens: int, edge: Engine, cloud: Cloud, link: EmulatedLink
) -> tuple[Figures, list[int]]:
    """The figures of one text, and its tokens."""
    began, params = time.perf_counter(), DecodingParams(max_new_tokens=num_tokens)
    with skydraft.generate(prompt, edge=edge, cloud=cloud, plan=plan, params=params) as generation:
        rounds = generation.rounds()
        next(rounds)
        first, up, down = time.perf_counter(), link.bytes_up, link.bytes_down
        rest = [done.record for done, _ in rounds]
        ended, up, down = time.perf_counter(), link.bytes_up - up, link.bytes_down - down
    found = Figures(
        sum(each.num_committed for each in rest), (ended - first) * 1e3, (ended - began) * 1e3,
        sum(each.target.num_passes for each in rest), sum(each.link.tokens_in for each in rest),
        sum(each.num_draft for each in rest), sum(each.num_accepted for each in rest), up, down,
    )  # fmt: skip
    return found, [*generation.token_ids]


@contextmanager
def link_to(port: int, rtt_ms: float) -> Iterator[tuple[EmulatedLink, Cloud]]:
    shape = LinkShape(delay_ms=rtt_ms / 2)
    with (
        EmulatedLink(("127.0.0.1", port), shape) as link,
        closing(skydraft.connect(link.address, require=True)) as cloud,
    ):
        yield link, cloud


def rounds_ms(text: RecordedText, k: int, step_ms: float, rtt_ms: float, costs: Seq[float]) -> float:
    """What a text takes in rounds of k drafts, if nothing else takes time."""
    agrees, at, ms = [*map(int.__eq__, text.draft_ids, text.target_ids)], 0, 0.0
    while at < len(agrees):
        num = min(k, len(agrees) - at)
        ms += num * step_ms + rtt_ms + costs[num]
        at += [*agrees[at : at + num], False].index(False) + 1
    return ms


def measure(
    texts: Seq[RecordedText], plans: dict[str, Plan], edge_of: Callable[[str], Engine], rtt_ms: float, port: int,
    most: int, runs: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """All ways over one link, text by text; each other text turns their order round. With several `runs` a text is
    written until it comes twice. Raises AssertionError for one that is not the stream's, of a plan that is not lossy.
    """
    found = {name: Figures() for name in plans}
    with link_to(port, rtt_ms) as (link, cloud):
        for index, text in enumerate([texts[0], *texts]):  # once before it counts
            for name, plan in [*plans.items()][:: 1 - 2 * (index % 2)]:
                num = min(most, len(text.target_ids))
                before = None
                for _ in range(runs):
                    figures, token_ids = timed(text.prompt, plan, num, edge_of(name), cloud, link)
                    if token_ids == before:
                        break
                    before = token_ids
                is_free = plan.is_lossy or not plan.verifies
                assert is_free or token_ids == text.target_ids[:num], (name, text.prompt)
                found[name] += figures if index else Figures()
    rows = {name: each.row(found["stream"]) for name, each in found.items()}
    return {"kind": texts[0].kind, "texts": len(texts), "rtt_ms": rtt_ms, "ways": rows}


def race(
    texts: Seq[RecordedText], kept: KeptChoices, step_ms: float, costs: Seq[float], rtt_ms: float, port: int
) -> dict[str, Any]:
    k = min(range(1, LONGEST + 1), key=lambda k: sum(rounds_ms(text, k, step_ms, rtt_ms, costs) for text in texts))
    plans = {"stream": make_plan("cloud"), "lossless": make_plan(), "first text": make_plan(), "rounds": make_plan(k=k),
             "edge": make_plan("edge")}  # fmt: skip
    further = FURTHER_ROW * step_ms

    def edge_of(name: str) -> RecordedDraft:
        return RecordedDraft(kept, step_ms, further, further if name == "first text" else 0.0)

    return {"k": k, **measure(texts, plans, edge_of, rtt_ms, port, max(LENGTHS.values()))}


HEAD = (
    "stream = 1         lossless  first text   rounds          edge  forwards   sent  accepted  bytes up/down a token"
)


def show(point: dict[str, Any]) -> None:
    ways, race = point["ways"], point["ways"]["lossless"]
    speeds = [race["speed"], ways["first text"]["whole"], ways["rounds"]["speed"], point["k"], ways["edge"]["speed"]]
    counts = [race[name] for name in ("forwards", "sent", "accepted", "bytes_up", "bytes_down")]
    line = "{:>10.2f}{:>12.2f}{:>9.2f} (k ={:>3}){:>6.2f}{:>10.2f}{:>7.2f}{:>10.2f}{:>6.0f}/{:.0f}"
    print(f"{point['kind']:<9}{point['rtt_ms']:>5g} ms" + line.format(*speeds, *counts), flush=True)


@dataclass(frozen=True, slots=True)
class Device:
    """One of many: it writes text after text in its own mode, and drafts what `kept` says."""

    number: int
    plan: Plan
    kept: KeptChoices

    def live(self, texts: Seq[RecordedText], address: str, step_ms: float, begin: float, end: float) -> int:
        """Tokens that come between two times of `time.perf_counter`."""
        num = 0
        with closing(skydraft.connect(address, require=True)) as cloud:
            for text in itertools.cycle([*texts[self.number :], *texts[: self.number]]):
                params, edge = DecodingParams(max_new_tokens=len(text.target_ids)), RecordedDraft(self.kept, step_ms)
                with skydraft.generate(
                    text.prompt, edge=edge, cloud=cloud, plan=self.plan, params=params
                ) as generation:
                    for done, _ in generation.rounds():
                        num += done.record.num_committed * (begin < (now := time.perf_counter()) <= end)
                        if now > end:
                            return num
        raise AssertionError("there is always another text")


def carried(num: int, path: Path, texts: Seq[RecordedText], real: Engine, step_ms: float) -> list[dict[str, Any]]:
    """Tokens a second of two halves of the devices, streams or not."""
    costs = row_ms_of("CUDA7B", MANY_MS, MANY_ROWS)
    good, bad = KeptChoices(real, Recording(texts)), KeptChoices(real, Recording(texts), is_wrong=True)
    stream, race = (make_plan("cloud"), good), (make_plan(), good)
    halves = {
        "streams": (stream, stream), "lossless": (race, race), "half lossless": (stream, race),
        "half nonsense": (stream, (make_plan(), bad)),
    }  # fmt: skip
    mixed = [each for group in itertools.zip_longest(*by_kind(texts).values()) for each in group if each]
    points = list[dict[str, Any]]()
    with (
        RecordedServer(path, costs, num) as server,
        EmulatedLink(("127.0.0.1", server.port), LinkShape(MANY_RTT / 2)) as link,
    ):
        for name, sides in halves.items():
            devices = [Device(index, *sides[2 * index // num]) for index in range(num)]
            begin = time.perf_counter() + WARM_S
            with ThreadPoolExecutor(num) as pool:
                jobs = [pool.submit(each.live, mixed, link.address, step_ms, begin, begin + MANY_S) for each in devices]
                rates = [job.result() / MANY_S for job in jobs]
            point = {"devices": name, "first_half": sum(rates[: num // 2]), "second_half": sum(rates[num // 2 :])}
            point |= {"together": sum(rates)}
            points.append(point | {"over_streams": {}})
            points[-1]["over_streams"] = {
                key: round(value / points[0][key], 3) for key, value in point.items() if key != "devices"
            }
            print(json.dumps(points[-1]), flush=True)
    return points


def by_kind(texts: Seq[RecordedText]) -> dict[str, list[RecordedText]]:
    return {kind: [text for text in texts if text.kind == kind] for kind in dict.fromkeys(text.kind for text in texts)}


def row_ms_of(name: str, target_ms: float, num_rows: int) -> list[float]:
    """ms of a forward of 1, 2, … rows."""
    costs = ROWS[name]
    return [round(target_ms * float(np.interp(n, [*costs], [*costs.values()])), 2) for n in range(1, num_rows + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=10, help="of each kind, at most")
    parser.add_argument("--kinds", default=",".join(LENGTHS))
    parser.add_argument("--rtt", default="0,20,80,150", help="round trips, ms")
    parser.add_argument("--speeds", default="25:45,8:35", help="ms of a draft step and of a target's forward")
    parser.add_argument("--rows", choices=ROWS, default="free", help="what a forward of n rows takes")
    parser.add_argument("--many", type=int, default=0, metavar="N", help="devices at one target")
    parser.add_argument("--modes", default="", help="these, with the real draft model")
    parser.add_argument("--texts", type=Path, default=Path("build/texts.jsonl"))
    parser.add_argument("--threads", type=int, default=1, help="for recording, and for the real draft model")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    given = parser.parse_args()
    texts = [
        each for each in recorded(given.texts, given.prompts, given.threads) if each.kind in given.kinds.split(",")
    ]
    real, points = skydraft.load(default_pair().draft, threads=given.threads), list[dict[str, Any]]()
    kept, pairs = (
        KeptChoices(real, Recording(texts)),
        [[*map(float, each.split(":"))] for each in given.speeds.split(",")],
    )
    print(machine())
    if given.many:
        points = carried(given.many, given.texts, texts, real, pairs[0][0])
    for step_ms, target_ms in [] if given.many else pairs:
        costs = row_ms_of(given.rows, target_ms, MAX_ROWS)
        print(f"\ndraft {step_ms:g} ms, target {target_ms:g} ms, rows {given.rows}\n{HEAD}")
        with RecordedServer(given.texts, costs, is_real=bool(given.modes)) as server:
            for rtt_ms, mine in itertools.product(map(float, given.rtt.split(",")), by_kind(texts).values()):
                if given.modes:
                    plans = {"stream": make_plan("cloud")} | {name: make_plan(name) for name in given.modes.split(",")}
                    point = measure(mine, plans, lambda name: real, rtt_ms, server.port, SHORT, MAX_RUNS)
                    print(mine[0].kind, rtt_ms, {name: row["speed"] for name, row in point["ways"].items()}, flush=True)
                else:
                    show(point := race(mine, kept, step_ms, costs, rtt_ms, server.port))
                points.append({"step_ms": step_ms, "target_ms": target_ms, "rows": given.rows, **point})
                write(given.out, points)
    write(given.out, points)


def write(out: Path | None, points: list[dict[str, Any]], **more: Any) -> None:
    """A run that is ended keeps what it has."""
    if out:
        content = {"command": f"{sys.argv[0]} {shlex.join(sys.argv[1:])}", "machine": machine()}
        out.write_text(json.dumps(content | more | {"points": points}, indent=1) + "\n", encoding="utf-8")
