"""Chinese texts as a regression run: punctuation, repeats, ends; with and without zh-short, in the presets.

    python -m bench.zh [--out DIR]

Bars, for zh-short on the prompts of `describe` and `scene`: median punctuation density of a text 0.05 to 0.25, none
over 0.40; no adjacent repeat; 2- and 3-gram repeat rates not above those of the target (mode cloud, without the
style; with it the target repeats itself less still, see the table); every text ends at a sentence end; no repeated
cycle. What is without the style, and all other prompts, is shown beside it whatever it is.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

from bench.workload import PROMPTS_FILE
from skydraft.characters import is_cjk, punctuation_density
from skydraft.choosing.stopping import Said
from skydraft.cli.main import run
from skydraft.decoding.stats import percentile
from skydraft.evaluation.findings import Findings, Setting
from skydraft.evaluation.records import read_records
from skydraft.evaluation.workloads import read_prompts

PLAIN = ("edge", "cloud", "lossless", "fluency", "quality", "auto")
MODES = (*PLAIN, *(f"{mode};style=zh-short" for mode in PLAIN))
BARRED = ("describe", "scene")
OTHERS = ("edge", *(f"{mode};style=zh-short" for mode in ("edge", "cloud", "fluency", "quality")))


DOUBLES = Path(__file__).with_name("data") / "lexical_doubles.txt"


def num_adjacent(text: str) -> int:
    """CJK characters that equal the one just before; words such as 慢慢 apart."""
    lines = DOUBLES.read_text(encoding="utf-8").splitlines()
    doubles = {word for line in lines if not line.startswith("#") for word in line.split()}
    return sum(a == b and is_cjk(a) and a + b not in doubles for a, b in itertools.pairwise(text))


def repeat_rate(texts: list[str], n: int) -> float:
    """N-grams of CJK ideographs, letters and digits that occurred before in the same text / n-grams."""
    contents = [[char for char in text if is_cjk(char) or char.isalnum()] for text in texts]
    grams = [[tuple(content[at : at + n]) for at in range(len(content) - n + 1)] for content in contents]
    return sum(len(each) - len(set(each)) for each in grams) / max(sum(map(len, grams)), 1)


def is_ended(text: str) -> bool:
    return Said().then(text.encode()).ends_sentence


def texts_of(setting: Setting) -> list[str]:
    return [case.generation.text for case in setting.all_cases]


def show(title: str, findings: Findings) -> None:
    """A row each mode."""
    print(f"\n{title}, {len(findings.settings[0].cases)} prompts")
    print(f"{'mode':<26}{'density p50':>12}{'max':>7}{'adjacent':>10}{'2-gram':>8}{'3-gram':>8}{'ends':>6}{'cycles':>8}"
          f"{'tokens':>8}")  # fmt: skip
    for setting in findings.settings:
        texts = texts_of(setting)
        densities = list(map(punctuation_density, texts))
        num_tokens = sum(case.num_tokens for case in setting.all_cases) / len(texts)
        print(f"{setting.mode.name:<26}{percentile(densities, 50):>12.3f}{max(densities):>7.3f}"
              f"{sum(map(num_adjacent, texts)):>10}{repeat_rate(texts, 2):>8.4f}{repeat_rate(texts, 3):>8.4f}"
              f"{sum(map(is_ended, texts)) / len(texts):>6.2f}{setting.value('cycles'):>8.2f}"
              f"{num_tokens:>8.1f}")  # fmt: skip


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
    texts = texts_of(setting)
    densities = list(map(punctuation_density, texts))
    median = percentile(densities, 50) or 0
    met = {
        f"median density {median:.3f} outside 0.05 to 0.25": 0.05 <= median <= 0.25,
        f"a text of density {max(densities):.3f}": max(densities) <= 0.40,
        "adjacent repeats": not any(map(num_adjacent, texts)),
        "a text that does not end at a sentence end": all(map(is_ended, texts)),
        "a repeated cycle": not setting.value("cycles"),
    }
    for n in (2, 3):
        ours, theirs = repeat_rate(texts, n), repeat_rate(texts_of(target), n)
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
