"""What the shipped calibration keeps, with one limit and with the limit that follows the text, replayed.

    python -m bench.kept [FOLDER …]

Along the target's own texts of comparisons that it was not fitted on, with the draft model's signals there; mode auto's
blocks and hand-back. Replayed: a real run leaves a text after a disagreement that was skipped.
"""

import argparse
from collections import Counter
from pathlib import Path

from bench.workload import labelled
from skydraft import make_plan
from skydraft.evaluation.records import read_records
from skydraft.gating import calibration
from skydraft.gating.allowance import Allowance
from skydraft.gating.fitting import LabelledText

_FOLDER = Path(__file__).parent.parent / "docs" / "report-zh-dev"
_FILE = Path(calibration.__file__).parent / "calibrations" / "qwen2.5-coder-0.5b--1.5b.json"
_AUTO = make_plan("auto")


def replay(text: LabelledText, allowance: Allowance, *, follows: bool) -> Counter[str]:
    """What one text costs. The target's own token follows a block that is right, and ends a correction."""
    assert _AUTO.k and _AUTO.hand_back
    counts, at, num_tokens = Counter[str](tokens=len(text.disagrees)), 0, len(text.disagrees)
    while (base := at) < num_tokens:
        at += 1
        while at < min(base + _AUTO.k, num_tokens) and not allowance.is_unsure(text.signals[base:at]):
            at += 1
        unchecked = text.signals[base:at]
        if allowance.is_unsure(unchecked):
            counts["calls"] += 1
            wrong = next((index for index in range(base, at) if text.disagrees[index]), None)
            own = at if wrong is None else wrong
            at, num_agreed, unchecked = own + 1, 0, ()
            while wrong is not None and at < num_tokens and not _AUTO.hand_back.is_over(at - own - 1, num_agreed):
                num_agreed = 0 if text.disagrees[at] else num_agreed + 1
                at += 1
            at = min(at, num_tokens)
            counts["written"] += at - own
        else:
            counts["wrong"] += sum(text.disagrees[base:at])
        if follows:
            allowance.observe(at - base, unchecked)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, default=[_FOLDER], help="with records.jsonl of comparisons")
    shipped = calibration.read_calibration(_FILE)
    assert _AUTO.k and _AUTO.hand_back
    for folder in parser.parse_args().folders:
        records = read_records(folder / "records.jsonl")
        alone = {(line.prompt, line.token_ids) for line in records.generations if line.mode == "cloud"}
        texts = [labelled(line, "target") for line in records.scores if (line.prompt, line.token_ids) in alone]
        print(f"{folder.name}: {len(texts)} texts; agreement kept, calls and written tokens a token")
        for asked in (0.9, 0.95, 0.98):
            limit = shipped.limit(asked, _AUTO.k, _AUTO.hand_back)
            for follows in (False, True):
                replays = (replay(text, Allowance(shipped, asked, limit), follows=follows) for text in texts)
                counts = sum(replays, Counter[str]())
                kept, calls, written = (counts[name] / counts["tokens"] for name in ("wrong", "calls", "written"))
                how = "follows the text" if follows else "one limit"
                print(f"asked {asked:.2f}, {how:<16}  {1 - kept:.3f}  {calls:.3f}  {written:.3f}")


if __name__ == "__main__":
    main()
