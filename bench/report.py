"""The report of the dev set under docs/: every mode in one process.

python -m bench report [--out DIR]
"""

import argparse
from contextlib import closing
from pathlib import Path

import skydraft
from bench.workload import PROMPTS_FILE
from skydraft import decoding_params
from skydraft.cli.progress import counted
from skydraft.engines.options import EngineOptions
from skydraft.lab.evaluation.comparison import ComparisonRequest, LoadedPair, compare
from skydraft.lab.evaluation.findings import Findings
from skydraft.lab.evaluation.modes import parse_modes
from skydraft.lab.evaluation.records import read_records
from skydraft.lab.evaluation.report.page import write_report
from skydraft.lab.evaluation.workloads import read_prompts
from skydraft.models import default_pair

MODES = "edge,cloud,lossless,lossless;k=5,fluency,quality,auto,auto;k=12;hand-back=0,auto;gate=calibrated:0.9"
NUM_TOKENS = 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/report-zh-dev"))
    out = parser.parse_args().out
    modes = parse_modes(MODES, lambda style: decoding_params(style, max_new_tokens=NUM_TOKENS))
    request, pair = ComparisonRequest(read_prompts(PROMPTS_FILE), modes, command="make report"), default_pair()
    with closing(skydraft.load(pair.draft)) as edge, closing(skydraft.load(pair.target)) as target:
        records = compare(request, LoadedPair(edge, target, EngineOptions()), out, print, counted)
    write_report(Findings(read_records(records)), out)
