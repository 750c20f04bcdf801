"""The demo pair with its target on a server without skydraft, beside the same target on `skydraft serve`.

    python -m bench stock --cloud URL [--serve HOST:PORT] [--out FILE] [--limit PROMPTS] [--tokens 64] [--modes A,B]

URL serves the target of the demo pair, for example a llama-server with its file; without `--serve` the target beside it
is in this process. Every prompt is answered in every mode by both before the next one. A run that was stopped goes on
where FILE ends. Agreement: one pass of the target here over the finished text; with `--itself` (llama-server) texts of
the server are held against its own choices, asked for one by one. Calls, written, requests, bytes: a token. Brackets:
95 % of a bootstrap over prompts.
"""

import argparse
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np

import skydraft
from bench.workload import load_pair, machine, prompts
from skydraft import DecodingParams, make_plan
from skydraft.decoding.generation import Generation
from skydraft.engines.base import Engine
from skydraft.engines.options import EngineOptions
from skydraft.intervals import Resamples
from skydraft.types import LinkCost

NAMES = ("tokens", "right", "calls", "written", "requests", "tokens_in", "tokens_hit", "bytes", "ms")


def judged(target: Engine, done: Generation) -> int:
    """How many tokens the target here would have written."""
    whole = np.array([*done.request.prompts.target.token_ids, *done.token_ids], np.int32)
    start, num_right = len(done.request.prompts.target.token_ids), 0
    with closing(target.open(whole[:start].tolist())) as sequence:
        while sequence.length < len(whole) - 1:
            at = sequence.length
            rows = sequence.extend(whole[at : min(at + target.invariant_rows, len(whole) - 1)])
            num_right += sum(row.max() == row[token_id] for row, token_id in zip(rows, whole[at + 1 :], strict=False))
    return int(num_right)


def judged_itself(url: str, done: Generation) -> int:
    """How many tokens a llama-server would have written after what stands before them."""
    prompt, num_right = list(done.request.prompts.target.token_ids), 0
    with httpx.Client(base_url=url.removesuffix("/v1"), timeout=300) as client:
        for at, token_id in enumerate(done.token_ids):
            asked = {"prompt": prompt + list(done.token_ids[:at]), "n_predict": 1, "temperature": 0,
                     "cache_prompt": True, "return_tokens": True}  # fmt: skip
            num_right += client.post("/completion", json=asked).raise_for_status().json()["tokens"] == [token_id]
    return num_right


def measured(done: Generation, num_right: int) -> list[float]:
    link = sum((record.link for record in done.records), LinkCost())
    return [
        len(done.token_ids), num_right, sum(record.outcome == "verified" for record in done.records),
        sum(record.num_written for record in done.records), link.num_requests, link.tokens_in, link.tokens_hit,
        link.bytes_up + link.bytes_down, done.records[-1].ended_ms,
    ]  # fmt: skip


class Comparison:
    """Answers prompts at a server and beside it, and keeps what each answer cost."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        self._edge, self._target = load_pair(EngineOptions(num_threads=asked.threads))
        self._right: dict[tuple[int, ...], int] = {}  # of texts of one prompt
        self.there = skydraft.connect(asked.cloud, api=asked.cloud_api, require=True, timeout_s=300)
        self.beside: Any = skydraft.connect(asked.serve, require=True, timeout_s=300) if asked.serve else self._target

    def answer(self, prompt: str, where: Any, mode: str) -> tuple[Generation, int]:
        """The finished text, and how many of its tokens the target here would have written."""
        params = DecodingParams(max_new_tokens=self._asked.tokens)
        done = skydraft.generate(prompt, edge=self._edge, cloud=where, params=params, plan=make_plan(mode))
        done.run()
        if done.token_ids not in self._right:
            self._right[done.token_ids] = judged(self._target, done)
        return done, self._right[done.token_ids]

    def of(self, prompt: str) -> dict[str, Any]:
        """All that one prompt gives."""
        self._right.clear()
        found: dict[str, Any] = {"prompt": prompt}
        for mode in ("cloud", *self._asked.modes.split(",")):
            for name, where in (("there", self.there), ("beside", self.beside)):
                done, num_right = self.answer(prompt, where, mode)
                if self._asked.itself and where is self.there:
                    num_right = judged_itself(self._asked.cloud, done)
                found[f"{mode} {name}"] = measured(done, num_right)
        return found


def show(lines: list[dict[str, Any]]) -> None:
    """The table of all prompts so far."""
    names = [name for name in lines[0] if name != "prompt"]
    sums = {name: np.array([line[name] for line in lines], float).T for name in names}  # [figure, prompt]
    resamples = Resamples(len(lines))
    print(f"{len(lines)} prompts\n{'':<16}{'agreement':>10}{'calls':>8}{'written':>8}{'requests':>9}{'cached':>7}"
          f"{'bytes':>7}{'tokens/s':>9}")  # fmt: skip
    for name, values in sums.items():
        of = dict(zip(NAMES, values, strict=True))
        total = {key: float(each.sum()) for key, each in of.items()}
        size, cached = total["tokens"], total["tokens_hit"] / (total["tokens_in"] or float("nan"))
        print(f"{name:<16}{total['right'] / size:>10.3f}{total['calls'] / size:>8.3f}{total['written'] / size:>8.3f}"
              f"{total['requests'] / size:>9.3f}{cached:>7.2f}{total['bytes'] / size:>7.0f}"
              f"{1e3 * size / total['ms']:>9.1f}  {size:.0f} tokens")  # fmt: skip
    for mode in sorted({name.split()[0] for name in names}):
        pair = [dict(zip(NAMES, sums[f"{mode} {where}"], strict=True)) for where in ("there", "beside")]
        said = list[str]()
        for key in ("right", "calls", "written"):
            less = resamples.compared(np.subtract, *((each[key], each["tokens"]) for each in pair))
            assert less  # each text has a token
            said.append(f"{key} {less.value:+.4f} [{less.low:+.4f}, {less.high:+.4f}]")
        print(f"{mode}, there less beside: {', '.join(said)}")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cloud", required=True, metavar="URL")
    parser.add_argument("--cloud-api", default="auto", metavar="API")
    parser.add_argument("--serve", metavar="HOST:PORT")
    parser.add_argument("--out", type=Path, metavar="FILE", help="lines of JSON, one a prompt")
    parser.add_argument("--limit", type=int, default=None, metavar="PROMPTS")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--modes", default="quality,auto")
    parser.add_argument("--itself", action="store_true", help="judge texts of a llama-server by itself")
    parser.add_argument("--threads", type=int, default=0)
    asked = parser.parse_args()
    print(machine())
    lines = (
        [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out and asked.out.exists() else []
    )
    comparison = Comparison(asked)
    for prompt in prompts(asked.limit)[len(lines) :]:
        lines.append(comparison.of(prompt))
        if asked.out:
            with asked.out.open("a", encoding="utf-8") as out:
                print(json.dumps(lines[-1], ensure_ascii=False), file=out)
        show(lines)
