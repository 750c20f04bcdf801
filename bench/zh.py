"""Chinese texts as a regression run: punctuation, repeats, ends; with and without zh-short, in the presets.

    python -m bench.zh [--out DIR]

Bars, for zh-short on the prompts of `describe` and `scene`: median punctuation density of a text 0.05 to 0.25, none
over 0.40; no adjacent repeat; 2- and 3-gram repeat rates not above those of the target (mode cloud, without the
style; with it the target repeats itself less still, see the table); every text ends at a sentence end; no repeated
cycle. What is without the style, and all other prompts, is shown beside it whatever it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench.workload import PROMPTS_FILE
from skydraft.characters import punctuation_density
from skydraft.cli.main import run
from skydraft.decoding.stats import percentile
from skydraft.evaluation.findings import Findings, Setting
from skydraft.evaluation.records import read_records
from skydraft.evaluation.workloads import read_prompts

PLAIN = ("edge", "cloud", "lossless", "fluency", "quality", "auto")
MODES = (*PLAIN, *(f"{mode};style=zh-short" for mode in PLAIN))
BARRED = ("describe", "scene")
OTHERS = ("edge", *(f"{mode};style=zh-short" for mode in ("edge", "cloud", "fluency", "quality")))


def show(title: str, findings: Findings) -> None:
    """A row each mode."""
    print(f"\n{title}, {len(findings.settings[0].cases)} prompts")
    print(f"{'mode':<26}{'density p50':>12}{'max':>7}{'adjacent':>10}{'2-gram':>8}{'3-gram':>8}{'ends':>6}{'cycles':>8}"
          f"{'tokens':>8}")  # fmt: skip
    for setting in findings.settings:
        densities = [punctuation_density(case.generation.text) for case in setting.all_cases]
        num_adjacent = sum(case.indicators.num_adjacent for case in setting.all_cases)
        num_tokens = sum(case.num_tokens for case in setting.all_cases) / len(setting.all_cases)
        print(f"{setting.mode.name:<26}{percentile(densities, 50):>12.3f}{max(densities):>7.3f}{num_adjacent:>10}"
              f"{setting.value('repeat_rate_2') or 0:>8.4f}{setting.value('repeat_rate_3') or 0:>8.4f}"
              f"{setting.value('ends_sentence'):>6.2f}{setting.value('cycles'):>8.2f}{num_tokens:>8.1f}")  # fmt: skip


def failures(findings: Findings) -> list[str]:
    """Which bars are not met."""
    found = []
    target = findings.setting("cloud")
    assert target is not None  # it is one of MODES
    for setting in findings.settings:
        if setting.mode.style:
            found += [f"{setting.mode.name}: {reason}" for reason in _reasons(setting, target)]
    return found


def _reasons(setting: Setting, target: Setting) -> list[str]:
    densities = [punctuation_density(case.generation.text) for case in setting.all_cases]
    median = percentile(densities, 50) or 0
    met = {
        f"median density {median:.3f} outside 0.05 to 0.25": 0.05 <= median <= 0.25,
        f"a text of density {max(densities):.3f}": max(densities) <= 0.40,
        "adjacent repeats": not any(case.indicators.num_adjacent for case in setting.all_cases),
        "a text that does not end at a sentence end": all(case.indicators.ends_sentence for case in setting.all_cases),
        "a repeated cycle": not any(case.indicators.num_cycles for case in setting.all_cases),
    }
    for n in (2, 3):
        ours, theirs = (side.value(f"repeat_rate_{n}") or 0.0 for side in (setting, target))
        met[f"{n}-gram repeat rate {ours:.4f} above the target's {theirs:.4f}"] = ours <= theirs
    return [reason for reason, is_met in met.items() if not is_met]


def compared(out: Path, categories: tuple[str, ...], modes: tuple[str, ...]) -> Findings:
    """The texts of the prompts of these categories in these modes."""
    out.mkdir(parents=True, exist_ok=True)
    chosen = out / "prompts.jsonl"
    lines = PROMPTS_FILE.read_text(encoding="utf-8").splitlines()
    chosen.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["category"] in categories), "utf-8")
    options = ["--prompts", str(chosen), "--modes", ",".join(modes)]
    if status := run(["compare", *options, "--out", str(out), "--no-scores"]):
        sys.exit(status)
    return Findings(read_records(out / "records.jsonl"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/bench-zh"))
    given = parser.parse_args()
    barred = compared(given.out / "barred", BARRED, MODES)
    show("describe and scene", barred)
    categories = {prompt.category for prompt in read_prompts(PROMPTS_FILE).prompts}
    show("the other prompts", compared(given.out / "others", tuple(sorted(categories - set(BARRED))), OTHERS))
    found = failures(barred)
    print("\n" + ("\n".join(f"NOT MET  {reason}" for reason in found) or "All bars of zh-short are met."))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
