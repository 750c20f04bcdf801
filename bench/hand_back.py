"""Calls to the target against tokens that it writes, by hand-back, on the demo pair in one process.

    python -m bench hand_back RESULTS.jsonl [--prompts FILE ...] [--modes A,B] [--tokens 200] [--threads 1] [--part 0/2]
    python -m bench hand_back RESULTS.jsonl [OTHER.jsonl ...] --show

Every prompt is answered in every mode (written as for `skydraft compare --modes`) before the next prompt. A token that
was skipped is compared with what the target would have written there: by the audit that came with a later verdict, or
at the end of a text by one more pass of the target, whose rows may differ in bits from single ones. Intervals: 95 %,
prompts resampled. A run that was killed goes on. With --part I/N every Nth prompt is answered, so that two runs on one
thread each share a machine.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

import skydraft
from bench.workload import machine
from skydraft.config import DecodingParams
from skydraft.decoding.generation import Generation
from skydraft.engines.base import Engine
from skydraft.engines.options import EngineOptions
from skydraft.lab.evaluation.modes import parse_modes
from skydraft.models import default_pair

DATA = Path(__file__).parent.parent / "data"
MODES = "cloud,auto,auto;k=12;hand-back=0,auto;hand-back=agree:2,auto;gate=calibrated:0.9"
_FIGURES = ("agreement", "calls", "written", "rows", "drafted", "speed")


def unaudited(done: Generation) -> int:
    """How many tokens at the end of a text the target has not seen."""
    last = 0
    for index, record in enumerate(done.records):
        last = index + 1 if record.outcome in ("verified", "written") else last
    return sum(record.num_committed for record in done.records[last:])


def wrong_at_the_end(cloud: Engine, done: Generation) -> int:
    """How many of the tokens that the target has not seen it would not have written."""
    num = unaudited(done)
    if not num:
        return 0
    whole = np.array([*done.request.prompts.target.token_ids, *done.token_ids], np.int32)
    start, wrong = len(whole) - num, 0
    with closing(cloud.open(whole[:start].tolist(), done.request.prompts.target.media)) as sequence:
        while sequence.length < len(whole) - 1:
            at = sequence.length
            rows = sequence.extend(whole[at : min(at + cloud.invariant_rows, len(whole) - 1)])
            wrong += sum(int(np.argmax(row)) != whole[at + 1 + index] for index, row in enumerate(rows))
    return int(wrong)


def measured(done: Generation, cloud: Engine) -> dict[str, Any]:
    records = done.records
    audited = sum(record.num_audited - record.num_agreed for record in records)
    return {
        "tokens": len(done.token_ids),
        "wrong": audited + (wrong_at_the_end(cloud, done) if done.request.plan.is_gated else 0),
        "calls": sum(record.outcome == "verified" for record in records),
        "written": sum(record.num_written for record in records),
        "rows": sum(record.target.num_rows for record in records),
        "drafted": sum(record.num_draft for record in records),
        "ms": records[-1].ended_ms,
        "ids": done.token_ids,
    }


def run(asked: argparse.Namespace) -> None:
    out: Path = asked.results[0]
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    known = {(each["prompt"], each["mode"]) for each in map(json.loads, lines)}
    part, parts = map(int, asked.part.split("/"))
    params = DecodingParams(max_new_tokens=asked.tokens)
    modes = parse_modes(asked.modes, lambda style: params)
    pair, options = default_pair(), EngineOptions(num_threads=asked.threads)
    edge, cloud = skydraft.load(pair.draft, options), skydraft.load(pair.target, options)
    prompts = [json.loads(line) for path in asked.prompts for line in path.read_text(encoding="utf-8").splitlines()]
    with out.open("a", encoding="utf-8") as file:
        for prompt in prompts[part::parts]:
            for mode in modes:
                if (prompt["id"], mode.name) in known:
                    continue
                done = skydraft.generate(prompt["prompt"], edge=edge, cloud=cloud, plan=mode.plan, params=params).run()
                found = {
                    "prompt": prompt["id"],
                    "category": prompt["category"],
                    "mode": mode.name,
                    "machine": machine(),
                }
                print(json.dumps(found | measured(done, cloud)), file=file, flush=True)


def figures(found: Iterable[dict[str, Any]]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for each in found:
        for name in ("tokens", "wrong", "calls", "written", "rows", "drafted", "ms"):
            total[name] += each[name]
    size = total["tokens"]
    return {
        "agreement": 1 - total["wrong"] / size, "calls": total["calls"] / size, "written": total["written"] / size,
        "rows": total["rows"] / size, "drafted": total["drafted"] / size, "speed": 1e3 * size / total["ms"],
    }  # fmt: skip


def show(found: list[dict[str, Any]]) -> None:
    rng = np.random.default_rng(0)
    groups = sorted({each["prompt"].rstrip("0123456789-") + " " + _kind(each) for each in found})
    print(found[0]["machine"])
    for group in (*groups, "all"):
        mine = [each for each in found if group in ("all", each["prompt"].rstrip("0123456789-") + " " + _kind(each))]
        by_mode: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        for each in mine:
            by_mode[each["mode"]][each["prompt"]] = each
        names = sorted(set.intersection(*(set(texts) for texts in by_mode.values())))
        cloud = by_mode.get("cloud")
        print(f"\n{group}: {len(names)} texts")
        print(f"{'mode':<44}" + "".join(f"{name:>24}" for name in _FIGURES) + f"{'/ cloud':>9}")
        for mode, texts in by_mode.items():
            whole = figures(texts[name] for name in names)
            drawn = [figures(texts[name] for name in rng.choice(names, len(names))) for _ in range(1000)]
            cells = []
            for key in _FIGURES:
                low, high = np.percentile([each[key] for each in drawn], [2.5, 97.5])
                cells.append(f"{whole[key]:.3f} [{low:.3f}, {high:.3f}]")
            ratio = whole["speed"] / figures(cloud[name] for name in names)["speed"] if cloud else float("nan")
            print(f"{mode:<44}" + "".join(f"{cell:>24}" for cell in cells) + f"{ratio:>9.2f}")


def _kind(each: dict[str, Any]) -> str:
    return "code" if "code" in each["category"] else "text"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--prompts", nargs="+", type=Path, default=[DATA / "prompts_long_dev.jsonl"])
    parser.add_argument("--modes", default=MODES)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--show", action="store_true")
    asked = parser.parse_args()
    if asked.show:
        lines = [line for path in asked.results for line in path.read_text(encoding="utf-8").splitlines()]
        show([json.loads(line) for line in lines])
    else:
        run(asked)
