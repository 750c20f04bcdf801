"""The report of the dev set under docs/: every mode in one process, and over an emulated link on some of the prompts.

    python -m bench.report [--out DIR]

The server at the other end of the link is a process of its own with a second copy of the target.
"""

import argparse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import skydraft
from bench.server import ServerProcess
from bench.workload import PROMPTS_FILE
from skydraft import decoding_params
from skydraft.cli.progress import counted
from skydraft.edge.cloud import Cloud
from skydraft.engines.options import EngineOptions
from skydraft.evaluation.comparison import ComparisonRequest, LoadedPair, compare
from skydraft.evaluation.delayed_link import DelayedLink
from skydraft.evaluation.modes import parse_modes
from skydraft.evaluation.records import read_records
from skydraft.evaluation.report.page import write_report
from skydraft.evaluation.workloads import read_prompts
from skydraft.models import default_pair

MODES = "edge,cloud,lossless,lossless;k=5,fluency,quality,auto,auto;k=12;hand-back=0,auto;gate=calibrated:0.9"
NUM_TOKENS, RTT_MS, LINK_PROMPTS = 48, 80.0, 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/report-zh-dev"))
    out = parser.parse_args().out
    modes = parse_modes(MODES, lambda style: decoding_params(style, max_new_tokens=NUM_TOKENS))
    request = ComparisonRequest(
        read_prompts(PROMPTS_FILE), modes, rtts_ms=(RTT_MS,), link_prompts=LINK_PROMPTS, command="make report"
    )
    server, pair = ServerProcess(default_pair().target, "--max-sessions", "2"), default_pair()

    @contextmanager
    def behind(rtt_ms: float) -> Iterator[Cloud]:
        with (
            DelayedLink(("127.0.0.1", server.port), rtt_ms / 2) as link,
            closing(skydraft.connect(link.address, require=True)) as cloud,
        ):
            yield cloud

    with closing(skydraft.load(pair.draft)) as edge, closing(skydraft.load(pair.target)) as target:
        records = compare(request, LoadedPair(edge, target, EngineOptions(), behind), out, print, counted)
    server.stop()
    print(f"Report: {write_report(read_records(records), out)}")


if __name__ == "__main__":
    main()
