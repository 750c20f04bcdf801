"""Learning to hear: the embedded speech pair on clips of its own, before and after its draft model was trained on them.

    python -m bench.learn_speech --out DIR [--clips 240] [--layers 2] [--seed 7001]

Clips are spoken by espeak-ng, which has to be installed, of another seed than any that the pair was trained on. They
are captioned in mode `quality` with what the target corrects kept; an adapter is trained on that; and the 60 held-out
clips of data/speech_zh_heldout are captioned before and after. The pair is a synthetic test bed
(recipes/tiny_omni/MODEL_CARD.md), and says nothing about real voices. What is done is kept in DIR.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import numpy as np

import skydraft
from bench.speech import HELDOUT, truths
from bench.workload import drafting
from recipes.tiny_omni.attributes import CLASSES as ATTRIBUTES
from recipes.tiny_omni.captions import DEFAULT_PROMPT, read_attributes
from recipes.tiny_omni.clips import make_clips, write_clips
from skydraft.cli.main import run
from skydraft.config import DecodingParams
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.base import Engine
from skydraft.evaluation.intervals import Resamples
from skydraft.learning.adapter import merged_with, read_adapter
from skydraft.learning.collect import Collector
from skydraft.models import cache_dir
from skydraft.prompts.messages import asked

EDGE, CLOUD = "tiny-omni-edge", "tiny-omni-cloud"
PARAMS = DecodingParams(max_new_tokens=96)
Row = dict[str, int]


def request_for(path: Path, prompt: str, mode: str) -> GenerateRequest:
    return GenerateRequest(asked(prompt, audio=skydraft.load_audio(path)), plan=drafting(mode), params=PARAMS)


def collect(folder: Path, clips: Iterable[Path], prompt: str, edge: Engine, cloud: Engine) -> None:
    collector = Collector(folder, notify=print)
    for number, path in enumerate(clips, 1):
        skydraft.start(request_for(path, prompt, "quality"), edge=edge, cloud=cloud, observers=[collector]).run()
        print(f"{number} clips collected", end="\r", flush=True)
    collector.close()


def measure(edge: Engine, cloud: Engine, prompt: str, modes: Iterable[str]) -> dict[str, list[Row]]:
    """Attributes said rightly, calls and tokens of each held-out clip, by mode."""
    truth = truths()
    found: dict[str, list[Row]] = {mode: [] for mode in modes}
    for name, wanted in truth.items():
        for mode, rows in found.items():
            done = skydraft.start(
                request_for(HELDOUT.parent / f"{name}.flac", prompt, mode), edge=edge, cloud=cloud
            ).run()
            said = read_attributes(done.text)
            right = sum(said[each] == wanted[each] for each in ATTRIBUTES)
            calls = done.stats.num_escalated if mode == "quality" else 0
            rows.append({"right": right, "of": len(ATTRIBUTES), "calls": calls, "tokens": done.stats.num_tokens})
    return found


def show(before: dict[str, list[Row]], after: dict[str, list[Row]]) -> None:
    print(f"\n{'held-out clips, before and after':<40}")
    resamples = Resamples(len(next(iter(before.values()))))
    for mode, rows in before.items():
        for what, part, whole in (("attributes right", "right", "of"), ("calls a token", "calls", "tokens")):
            new, old = (
                (np.array([row[part] for row in each], float), np.array([row[whole] for row in each], float))
                for each in (after[mode], rows)
            )
            values = [side[0].sum() / side[1].sum() for side in (new, old)]
            interval = resamples.difference(new, old)
            bounds = f"[{interval[0]:+.4f}, {interval[1]:+.4f}]" if interval else ""
            print(f"{mode:<9}{what:<20}{values[1]:>8.4f}{values[0]:>8.4f}  {values[0] - values[1]:+.4f} {bounds}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/learn-speech"))
    parser.add_argument("--clips", type=int, default=240)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=7001)
    given = parser.parse_args()
    prompt = DEFAULT_PROMPT
    clips = given.out / f"clips-{given.seed}"
    if not (clips / "truth.jsonl").is_file():
        write_clips(make_clips(given.clips, given.seed), clips)
    lessons, adapter = given.out / f"lessons-{given.seed}", given.out / f"l{given.layers}-e{given.epochs}.safetensors"
    with closing(skydraft.load(EDGE)) as edge, closing(skydraft.load(CLOUD)) as cloud:
        if not lessons.is_dir():
            collect(lessons, sorted(clips.glob("*.flac")), prompt, edge, cloud)
        before = measure(edge, cloud, prompt, ("edge", "quality", "cloud"))
        began = time.monotonic()
        how = ["--layers", given.layers, "--epochs", given.epochs, "--rate", given.rate, "--out", adapter]
        models = ["--edge-model", EDGE, "--cloud-model", CLOUD]
        if not adapter.is_file() and run(["learn", "train", str(lessons), *map(str, how), *models]):
            return 1
        print(f"trained in {time.monotonic() - began:.0f} s")
        with closing(skydraft.load(merged_with(read_adapter(adapter), edge, cache_dir()))) as learned:
            after = measure(learned, cloud, prompt, ("edge", "quality", "cloud"))
    show(before, after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
