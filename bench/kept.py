"""The agreement that the shipped calibration keeps, replayed along committed records that it was not fitted on.

    python -m bench.kept [FOLDER]

Along the target's own texts of a comparison, with the draft model's signals there. Replayed: a real run leaves a text
after a disagreement that was skipped.
"""

import argparse
from pathlib import Path

from bench.workload import labelled
from skydraft.evaluation.records import read_records
from skydraft.gating import calibration
from skydraft.gating.fitting import walk
from skydraft.gating.hand_back import parse_hand_back

_FOLDER = Path(__file__).parent.parent / "docs" / "report-zh-dev"
_FILE = Path(calibration.__file__).parent / "calibrations" / "qwen2.5-coder-0.5b--1.5b.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=_FOLDER, help="with the records.jsonl of a comparison")
    records = read_records(parser.parse_args().folder / "records.jsonl")
    alone = {(line.prompt, line.token_ids) for line in records.generations if line.mode == "cloud"}
    texts = [labelled(line, "target") for line in records.scores if (line.prompt, line.token_ids) in alone]
    num_tokens = sum(len(text.disagrees) for text in texts)
    shipped = calibration.read_calibration(_FILE)
    print(f"{len(texts)} texts, {num_tokens} tokens; a token each: agreement kept, calls, written")
    for k, name in ((6, "agree:4"), (12, "0")):
        for asked in (0.9, 0.95, 0.98):
            limit = shipped.limit(asked, k, parse_hand_back(name))
            replays = [
                walk(calibration.risks_of(shipped.risks, text.signals), text.disagrees, limit, k, parse_hand_back(name))
                for text in texts
            ]
            wrong, calls, written = (
                sum(getattr(each, what) for each in replays) / num_tokens
                for what in ("num_wrong", "num_calls", "num_written")
            )
            print(f"k={k:<3} hand-back {name:<8} asked {asked:.2f}  {1 - wrong:.3f}  {calls:.3f}  {written:.3f}")


if __name__ == "__main__":
    main()
