"""A vLLM that takes a device's drafts, and its own speculation, beside the stream of the same vLLM without any.

    python -m bench vllm CHECKPOINT [--own-draft CHECKPOINT] [--draft MODEL] [--prompts 3] [--tokens 64] [--rtt 20]

Each server has a thread on the first core, and the device one on the last. One way after another runs beside the
stream, text by text in turn: `race`; `no drafts`, with the class loaded; `n-gram`, vLLM's own prompt lookup; and `own
draft model`, which shares the server's core. Rates count from the first token on. Forwards are those that vLLM counts.
A forward of several rows may choose otherwise near ties: `same` are the texts that are the stream's.
"""

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx

import skydraft
from bench.emulated_link import EmulatedLink, LinkShape
from bench.link import asked, write
from bench.workload import machine
from skydraft.config import DecodingParams
from skydraft.decoding.plan import make_plan
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.engines.options import EngineOptions
from skydraft.models import default_pair

VLLM = Path(os.environ.get("VLLM", ".venv-vllm")) / "bin" / "vllm"
DRAFTS, NUM_DRAFTS, START_S = 7374, 7, 900
SETTINGS = {
    "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_PLUGINS": "",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "SKYDRAFT_DRAFTS_PORT": str(DRAFTS),
    "PYTHONPATH": str(Path(__file__).parent.parent / "skydraft-vllm"),
}  # fmt: skip
FLAGS = ["--dtype", "bfloat16", "--max-model-len", "1024", "--block-size", "32", "--max-num-seqs", "8",
         "--enforce-eager", "--served-model-name", "stock"]  # fmt: skip


@contextmanager
def vllm_serve(folder: Path, port: int, core: int, speculation: dict[str, Any] | None) -> Iterator[str]:
    """The address of a vLLM, once it answers."""
    how = ["--speculative-config", json.dumps(speculation)] if speculation else []
    log, url = Path("build") / f"vllm-{port}.log", f"http://127.0.0.1:{port}"
    log.parent.mkdir(exist_ok=True)
    command = [
        "taskset",
        "-c",
        str(core),
        str(VLLM.absolute()),
        "serve",
        str(folder),
        "--port",
        str(port),
        *FLAGS,
        *how,
    ]
    with (
        log.open("wb") as said,
        subprocess.Popen(command, stdout=said, stderr=said, env=os.environ | SETTINGS) as server,
    ):
        try:
            end = time.monotonic() + START_S
            while server.poll() is None and time.monotonic() < end:
                with suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/health").is_success:
                        break
                time.sleep(0.5)
            else:
                raise AssertionError(log.read_text(errors="replace")[-2000:])
            yield url
        finally:
            server.terminate()


@dataclass(frozen=True, slots=True)
class Written:
    """A text: its tokens, the time from the first one on, and vLLM's forwards."""

    token_ids: tuple[int, ...]
    ms: float
    forwards: float


class Side:
    """A vLLM, and a connection to it."""

    def __init__(self, url: str, cloud: Cloud, edge: Engine, mode: str) -> None:
        self._url, self._cloud, self._edge, self._plan = url, cloud, edge, make_plan(mode)

    def forwards(self) -> float:
        lines = httpx.get(f"{self._url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:iteration_tokens_total_count"))

    def write(self, prompt: str, num_tokens: int) -> Written:
        before, params = self.forwards(), DecodingParams(max_new_tokens=num_tokens)
        with skydraft.generate(prompt, edge=self._edge, cloud=self._cloud, plan=self._plan, params=params) as text:
            for _ in text.rounds():
                pass
        took_ms = text.records[-1].ended_ms - text.records[0].ended_ms
        return Written(text.token_ids, took_ms, self.forwards() - before)


def compared(stream: Side, way: Side, prompts: list[str], num_tokens: int) -> dict[str, float]:
    """Speeds and counts of a way, over the stream's."""
    pairs = list[tuple[Written, Written]]()
    for index, prompt in enumerate([prompts[0], *prompts]):  # once before it counts
        sides = (stream, way) if index % 2 else (way, stream)
        both = [side.write(prompt, num_tokens) for side in sides]
        pairs.append((both[0], both[1]) if index % 2 else (both[1], both[0]))
    del pairs[0]
    rate = [(len(one.token_ids) - 1) / one.ms for pair in pairs for one in pair]
    nums = [sum(len(pair[at].token_ids) - 1 for pair in pairs) for at in (0, 1)]
    times = [sum(pair[at].ms for pair in pairs) for at in (0, 1)]
    return {
        "speed": round(nums[1] / times[1] / (nums[0] / times[0]), 3), "stream_ms": round(times[0] / nums[0], 1),
        "forwards": round(sum(way.forwards - 1 for _, way in pairs) / nums[1], 3), "texts": len(pairs),
        "same": sum(one.token_ids == other.token_ids for one, other in pairs),
        "median": round(statistics.median(b / a for a, b in zip(rate[::2], rate[1::2], strict=True)), 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--own-draft", type=Path, metavar="CHECKPOINT", help="vLLM's own draft model")
    parser.add_argument("--draft", default=default_pair().draft, help="the device's")
    parser.add_argument("--kinds", default="zh,everyday,code,zh-long,edits")
    parser.add_argument("--ways", default="race,no drafts,n-gram,own draft model")
    parser.add_argument("--prompts", type=int, default=3, help="of each kind, at most")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rtt", type=float, default=20.0, help="round trip, ms")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    given = parser.parse_args()
    first, last = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
    drafted = {"method": "custom_class", "model": "skydraft_vllm.Drafts", "num_speculative_tokens": NUM_DRAFTS}
    ngram = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_max": 4}
    ways = [("race", drafted), ("no drafts", drafted), ("n-gram", ngram)]
    if given.own_draft:
        own = {"method": "draft_model", "model": str(given.own_draft.absolute()), "num_speculative_tokens": 3}
        ways.append(("own draft model", own))
    points, about = (
        list[dict[str, Any]](),
        f"{given.target.name} in bfloat16 on core {first}, {given.draft} on core {last}",
    )
    print(about := machine(about))
    with ExitStack() as stack:
        plain = stack.enter_context(vllm_serve(given.target.absolute(), 8101, first, None))
        os.sched_setaffinity(0, {last})
        edge = stack.enter_context(closing(skydraft.load(given.draft, EngineOptions(2048, num_threads=1))))
        shape = LinkShape(delay_ms=given.rtt / 2)

        def side(stack: ExitStack, url: str, mode: str, drafts: int | None = None) -> Side:
            web, port = (
                stack.enter_context(EmulatedLink(("127.0.0.1", each), shape))
                for each in (int(url.rpartition(":")[2]), drafts or 9)
            )
            cloud = skydraft.connect(
                f"http://{web.address}/v1", require=True, timeout_s=300, drafts=port.address if drafts else None
            )
            return Side(url, stack.enter_context(closing(cloud)), edge, mode)

        stream = side(stack, plain, "cloud")
        for name, speculation in ((name, how) for name, how in ways if name in given.ways.split(",")):
            with ExitStack() as own_stack:
                url = own_stack.enter_context(vllm_serve(given.target.absolute(), 8102, first, speculation))
                mode, drafts = ("lossless", DRAFTS) if name == "race" else ("cloud", None)
                way = side(own_stack, url, mode, drafts)
                for kind in given.kinds.split(","):
                    found = compared(stream, way, asked()[kind][: given.prompts], given.tokens)
                    points.append({"way": name, "kind": kind, "rtt_ms": given.rtt, **found})
                    print(json.dumps(points[-1]), flush=True)
                    write(given.out, points, machine=about)
