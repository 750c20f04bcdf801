"""The race for real: two engines in two processes on a core each, against the stream of the same server.

    python -m bench race [--draft MODEL] [--target MODEL] [--prompts 4] [--tokens 96] [--rtt 20] [--out FILE]

First what a forward of the target takes by its rows, on one thread: two to four rows have to cost little. Then texts of
each kind of work in both modes, in turn, over an emulated link; each in `lossless` has to be that of the stream. Rates
count from the first token on, when both have read the prompt. Before a kind is measured its first text is written in
both modes once, as an engine compares the first forward of each shape with single rows.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import skydraft
from bench.clients import row_curve, serving
from bench.link import Figures, asked, link_to, timed, write
from bench.workload import machine
from skydraft.decoding.plan import make_plan
from skydraft.engines.options import EngineOptions
from skydraft.models import default_pair

KINDS = ("zh", "everyday", "code", "edits")
ROWS = (1, 2, 3, 4, 8)
CONTEXT = 1024
MODES = {"stream": make_plan("cloud"), "lossless": make_plan()}


def measure(kind: str, prompts: list[str], num_tokens: int, edge: Any, port: int, rtt_ms: float) -> dict[str, Any]:
    """Both modes, text by text. Raises AssertionError where a text in lossless is not the stream's."""
    found, ratios = {name: Figures() for name in MODES}, list[float]()
    with link_to(port, rtt_ms) as (link, cloud):
        for index, prompt in enumerate([prompts[0], *prompts]):
            own = {}
            for name in [*MODES][:: 1 - 2 * (index % 2)]:
                own[name] = timed(prompt, MODES[name], num_tokens, edge, cloud, link)
            assert own["stream"][1] == own["lossless"][1], prompt
            if index:
                found = {name: found[name] + own[name][0] for name in MODES}
                ratios.append(own["stream"][0].spent_ms / own["lossless"][0].spent_ms)
    ways = {name: each.row(found["stream"]) for name, each in found.items()}
    return {"kind": kind, "rtt_ms": rtt_ms, "texts": [round(ratio, 3) for ratio in ratios], "ways": ways}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", default=default_pair().draft)
    parser.add_argument("--target", default=default_pair().target)
    parser.add_argument("--prompts", type=int, default=4, help="of each kind")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--tokens", type=int, default=96, help="of a text, at most")
    parser.add_argument("--rtt", type=float, default=20.0, help="round trip, ms")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    given = parser.parse_args()
    first, last = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {first})  # which the server inherits
    curve = row_curve(given.target, EngineOptions(CONTEXT, num_threads=1), ROWS)
    models = f"{given.draft} on core {last}, {given.target} on core {first}, a thread each"
    costs = {f"t_v({num})": round(ms / curve[1], 2) for num, ms in curve.items()} | {"t_v(1), ms": round(curve[1], 1)}
    print(machine(models), costs, sep="\n", flush=True)
    points = list[dict[str, Any]]()
    with serving("--model", given.target, "--threads", "1", "--context", str(CONTEXT)) as (address, _):
        os.sched_setaffinity(0, {last})
        with skydraft.load(given.draft, EngineOptions(CONTEXT, num_threads=1)) as edge:
            for kind in given.kinds.split(","):
                port = int(address.rpartition(":")[2])
                points.append(measure(kind, asked()[kind][: given.prompts], given.tokens, edge, port, given.rtt))
                race = points[-1]["ways"]["lossless"]
                print(f"{kind:<9} {race['speed']:.2f} of the stream, {race['whole']:.2f} from the request on; texts "
                      f"{points[-1]['texts']}; {race['forwards']:.2f} forwards, {race['sent']:.2f} drafts a token, "
                      f"{race['accepted']:.2f} accepted", flush=True)  # fmt: skip
                write(given.out, points, machine=machine(models), costs=costs)
