"""Speech on the embedded pair: what each mode gets right on the held-out clips.

    python -m bench speech [--out DIR] [--limit N] [--demo]

Runs `skydraft compare` over data/speech_zh_heldout and reads attributes out of the captions it wrote. The models are a
synthetic test bed (recipes/tiny_omni/MODEL_CARD.md): figures say whether drafting and checking speech works, nothing
about real voices.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

from recipes.tiny_omni.attributes import CLASSES as ATTRIBUTES
from recipes.tiny_omni.captions import read_attributes
from skydraft.cli.main import run
from skydraft.evaluation.findings import Findings, Setting
from skydraft.evaluation.records import Records, read_records

HELDOUT = Path(__file__).parent.parent / "data" / "speech_zh_heldout" / "truth.jsonl"
MODES = "edge,cloud,lossless;k=5,fluency,quality,auto;gate=calibrated:0.9995;k=12;hand-back=0"
MODELS = ("--edge-model", "tiny-omni-edge", "--cloud-model", "tiny-omni-cloud")


def truths() -> dict[str, dict[str, str]]:
    """What is true of each clip, by its id."""
    lines = map(json.loads, HELDOUT.read_text(encoding="utf-8").splitlines())
    return {line["id"]: {name: line[name] for name in ATTRIBUTES} for line in lines}


def accuracy(setting: Setting, truth: dict[str, dict[str, str]]) -> dict[str, float]:
    """Share of clips whose caption says each attribute rightly; one left out counts as wrong. `all` is over all."""
    right: dict[str, list[bool]] = defaultdict(list)
    for case in setting.all_cases:
        said = read_attributes(case.generation.text)
        for name, value in truth[case.generation.prompt].items():
            right[name].append(said[name] == value)
    shares = {name: sum(flags) / len(flags) for name, flags in right.items()}
    return shares | {"all": sum(map(sum, right.values())) / sum(map(len, right.values()))}


def exact_captions(setting: Setting, truth: dict[str, dict[str, str]]) -> float:
    """Share of captions with every attribute right."""
    said = [(read_attributes(case.generation.text), truth[case.generation.prompt]) for case in setting.all_cases]
    return sum(all(found[name] == value for name, value in wanted.items()) for found, wanted in said) / len(said)


def show(records: Records) -> None:
    """A row each mode."""
    truth, findings = truths(), Findings(records)
    print(f"{'mode':<34}" + "".join(f"{name:>10}" for name in (*ATTRIBUTES, "all", "caption"))
          + f"{'calls':>8}{'agree':>7}{'tok/s':>7}")  # fmt: skip
    for setting in findings.settings:
        shares = accuracy(setting, truth)
        row = "".join(f"{shares[name]:>10.3f}" for name in (*ATTRIBUTES, "all"))
        names = ("cloud_calls_per_token", "target_agreement", "tokens_per_s")
        sums = (tuple(map(sum, setting.sums(name))) for name in names)
        calls, agreement, speed = (above / below if below else 0.0 for above, below in sums)
        print(f"{setting.mode.name:<34}{row}{exact_captions(setting, truth):>10.3f}"
              f"{calls:>8.3f}{agreement:>7.3f}{speed:>7.1f}")  # fmt: skip


def show_texts(records: Records) -> None:
    """The captions of each clip, mode by mode."""
    for prompt in records.run.prompts:
        print(f"\n{prompt.id}  {Path(prompt.audio or '').name}")
        for line in records.generations:
            if line.prompt == prompt.id:
                print(f"  {line.mode:<9} {line.text}")
    print()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/speech"))
    parser.add_argument("--limit", type=int)
    parser.add_argument("--modes", default=MODES)
    parser.add_argument("--demo", action="store_true", help="Three clips, with their captions.")
    given = parser.parse_args()
    out = given.out / "demo" if given.demo else given.out
    limit = 3 if given.demo else given.limit
    options = ["--prompts", str(HELDOUT), *MODELS, "--modes", given.modes, "--out", str(out)]
    if status := run(["compare", *options, "--max-new-tokens", "96", *(["--limit", str(limit)] if limit else [])]):
        return status
    records = read_records(out / "records.jsonl")
    if given.demo:
        show_texts(records)
    show(records)
    return 0
