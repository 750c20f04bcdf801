"""Speech on the embedded pair: what each mode gets right on the held-out clips.

    python -m bench speech [--out DIR] [--limit N] [--demo] [--save] [--rtt MS]

Runs `skydraft compare` over data/speech_zh_heldout and reads attributes out of the captions it wrote. With `--rtt` the
target is a `skydraft serve` of its own process, behind an emulated link with that round trip. `--save` puts the figures
into docs/figures/speech.json. The models are a synthetic test bed (recipes/tiny_omni/MODEL_CARD.md): figures say
whether drafting and checking speech works, nothing about real voices.
"""

import argparse
import json
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from bench.clients import serving
from recipes.tiny_omni.attributes import CLASSES as ATTRIBUTES
from recipes.tiny_omni.captions import read_attributes
from skydraft.cli.main import run
from skydraft.lab.evaluation.findings import Findings, Setting
from skydraft.lab.evaluation.records import Records, read_records

HELDOUT = Path(__file__).parent.parent / "data" / "speech_zh_heldout" / "truth.jsonl"
MODES = "cloud,edge,fluency,quality,lossless;k=6,lossless"
FIGURES = Path(__file__).parent.parent / "docs" / "figures" / "speech.json"


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


def figures(records: Records) -> dict[str, dict[str, float]]:
    """By mode: clips, captions and attributes that are right, and what that cost."""
    truth, findings = truths(), Findings(records)
    names = ("cloud_calls_per_token", "acceptance_rate", "target_passes_per_token", "target_agreement", "ttft_ms",
             "tokens_per_s")  # fmt: skip
    found = {}
    for setting in findings.settings:
        sums = {name: setting.sums(name) for name in names}
        links = [record.link for case in setting.all_cases for record in case.generation.records]
        found[setting.mode.name] = {
            "clips": len(setting.all_cases), "captions": exact_captions(setting, truth),
            "attributes": accuracy(setting, truth)["all"],
            "bytes_up": sum(link.bytes_up for link in links) / len(setting.all_cases),
            **{name: above.sum() / below.sum() if below.any() else 0.0 for name, (above, below) in sums.items()},
        }  # fmt: skip
    return found


def show(found: dict[str, dict[str, float]]) -> None:
    """A row each mode."""
    names = list(next(iter(found.values())))
    print(f"{'mode':<16}" + "".join(f"{name.removesuffix('_per_token'):>16}" for name in names))
    for mode, row in found.items():
        print(f"{mode:<16}" + "".join(f"{row[name]:>16.3f}" for name in names))


def show_texts(records: Records) -> None:
    """The captions of each clip, mode by mode."""
    for prompt in records.run.prompts:
        print(f"\n{prompt.id}  {Path(prompt.audio or '').name}")
        for line in records.generations:
            if line.prompt == prompt.id:
                print(f"  {line.mode:<9} {line.text}")
    print()


def save(key: str, found: dict[str, dict[str, float]]) -> None:
    before = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    rows = {mode: {name: round(value, 4) for name, value in row.items()} for mode, row in found.items()}
    FIGURES.write_text(json.dumps(before | {key: rows}, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/speech"))
    parser.add_argument("--limit", type=int)
    parser.add_argument("--modes", default=MODES)
    parser.add_argument("--rtt", type=float, help="Over an emulated link with this round trip, in milliseconds.")
    parser.add_argument("--save", action="store_true", help="Write the figures into docs/figures/speech.json.")
    parser.add_argument("--demo", action="store_true", help="Three clips, with their captions.")
    given = parser.parse_args()
    out = given.out / "demo" if given.demo else given.out
    limit = 3 if given.demo else given.limit
    options = ["--prompts", str(HELDOUT), "--modes", given.modes, "--out", str(out), "--max-new-tokens", "96"]
    options += ["--limit", str(limit)] if limit else []
    with ExitStack() as stack:
        target = ["--cloud-model", "tiny-omni-cloud"]
        if given.rtt is not None:
            address, _ = stack.enter_context(serving("--model", "tiny-omni-cloud"))
            target = ["--cloud", address, "--emulate-rtt", str(given.rtt)]
        if status := run(["compare", "--edge-model", "tiny-omni-edge", *target, *options]):
            return status
    records = read_records(out / "records.jsonl")
    if given.demo:
        show_texts(records)
    show(found := figures(records))
    if given.save:
        save("here" if given.rtt is None else f"{given.rtt:g} ms", found)
    return 0
