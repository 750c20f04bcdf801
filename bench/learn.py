"""A draft model that learns from its corrections: used for real, trained, applied, and measured on held-out prompts.

    python -m bench.learn --out DIR [--sizes 30,60,120,240] [--held-out 60] [--minutes 15] [--layers 12] [--rate 0.0001]
    python -m bench.learn --out DIR --sizes 240 --dev 0 --alpha --layers 4    # another setting, α alone

300 prompts of one domain (descriptions of products): the first 240 are answered in mode `quality` with --learn, and
for each size an adapter is trained on the answers to as many of them, and calibrated. Then the held-out prompts
are answered before and after; of the dev set of mixed prompts, with the largest size, only α is measured. Figures are
paired over prompts, with intervals of 95 %. What is done is kept in DIR: started again, it goes on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import skydraft
from bench.workload import difference
from skydraft.cli.main import run
from skydraft.config import DecodingParams
from skydraft.decoding.plan import make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.base import Engine
from skydraft.engines.options import EngineOptions
from skydraft.evaluation.intervals import Resamples
from skydraft.evaluation.scoring import Scorer
from skydraft.evaluation.texts import indicators
from skydraft.learning.collect import Collector
from skydraft.learning.lessons import Store
from skydraft.models import default_pair
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import read_prompt

HERE = Path(__file__).parent
PRODUCTS = HERE / "data" / "prompts_zh_products.jsonl"
DEV = HERE.parent / "data" / "prompts_zh_dev.jsonl"
PARAMS = DecodingParams(max_new_tokens=48)
AGREEMENT = 0.95
RATE, EPOCHS = 0.00015, 4  # those of `learn train`
# name: what it is a ratio of, in the sums of a row
FIGURES = {
    "α along the target's text": ("agreed", "tokens"),
    "calls a token of auto": ("auto_calls", "auto_tokens"),
    "agreement of auto": ("auto_agreed", "auto_tokens"),
    "tokens a round, lossless": ("lossless_tokens", "lossless_rounds"),
    "agreement of edge": ("edge_agreed", "edge_tokens"),
    "2-gram repeats of edge": ("edge_repeats", "edge_grams"),
    "loops a text of edge": ("edge_loops", "texts"),
}
Row = dict[str, Any]


def prompts_of(path: Path) -> list[str]:
    """The prompts of a file, in order."""
    return [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()]


def collect(folder: Path, edge: Engine, cloud: Engine, prompts: Sequence[str]) -> None:
    """Answer prompts in mode quality, and keep what is corrected; those that are there already are left out."""
    collector = Collector(folder, notify=print)
    known = {lesson.prompt_ids for lesson in collector.store.lessons(Counter())}
    for number, prompt in enumerate(prompts):
        messages = asked(prompt)
        if read_prompt(edge, messages).edge.token_ids in known:
            continue
        request = GenerateRequest(messages, plan=make_plan("quality"), params=PARAMS)
        skydraft.start(request, edge=edge, cloud=cloud, observers=[collector]).run()
        print(f"{number + 1} of {len(prompts)} collected", end="\r", flush=True)
    collector.close()


def part_of(folder: Path, size: int, edge: Engine, prompts: Sequence[str]) -> Path:
    """A folder with the lessons of the first prompts alone."""
    out = folder.with_name(f"{folder.name}-{size}")
    shutil.rmtree(out, ignore_errors=True)
    wanted = {read_prompt(edge, asked(prompt)).edge.token_ids for prompt in prompts[:size]}
    store = Store(out)
    for lesson in Store(folder).lessons(Counter()):
        if lesson.prompt_ids in wanted:
            store.add(lesson)
    return out


def measure(edge: Engine, cloud: Engine, calibrated: bool, prompts: Sequence[str]) -> Iterator[Row]:
    """The sums of each prompt. `auto` is left out where the pair is not calibrated."""
    scorer = Scorer(edge, cloud)

    def write(mode: str, **plan: Any) -> tuple[Any, Row]:
        request = GenerateRequest(asked(prompt), plan=make_plan(**(plan or {"mode": mode})), params=PARAMS)
        done = skydraft.start(request, edge=edge, cloud=cloud).run()
        line = scorer.score("", read_prompt(edge, asked(prompt)), done.token_ids, PARAMS)
        agreed = sum(mine == theirs for mine, theirs in zip(line.token_ids, line.choices, strict=True))
        drafted = sum(mine == theirs for mine, theirs in zip(line.drafted, line.choices, strict=True))
        scorer.close()
        return done, {"agreed": agreed, "drafted": drafted, "tokens": len(done.token_ids)}

    for prompt in prompts:
        done, target = write("cloud")
        target_ids = list(done.token_ids)
        lossless, _ = write("lossless", gate="always", k=5)
        same = target_ids == list(lossless.token_ids)
        alone, found = write("edge")
        text = indicators(alone.text, np.array(alone.token_ids, np.int32))
        row = {
            "prompt": prompt, "texts": 1, "agreed": target["drafted"], "tokens": target["tokens"],
            "lossless_tokens": lossless.stats.num_tokens, "lossless_rounds": lossless.stats.num_rounds,
            "lossless_same": len(target_ids) if same else 0,
            "edge_agreed": found["agreed"], "edge_tokens": found["tokens"],
            "edge_repeats": text.num_repeats[2], "edge_grams": text.num_ngrams[2], "edge_loops": text.num_cycles,
        }  # fmt: skip
        if calibrated:
            auto, judged = write("auto", gate=f"calibrated:{AGREEMENT}", k=12, eager=True)
            row |= {"auto_calls": auto.stats.num_escalated, "auto_tokens": judged["tokens"],
                    "auto_agreed": judged["agreed"]}  # fmt: skip
        yield row


def agreement_alone(edge: Engine, cloud: Engine, prompts: Sequence[str]) -> Iterator[Row]:
    """α along the target's text, for each prompt."""
    scorer = Scorer(edge, cloud)
    for prompt in prompts:
        request = GenerateRequest(asked(prompt), plan=make_plan("cloud"), params=PARAMS)
        target_ids = skydraft.start(request, edge=edge, cloud=cloud).run().token_ids
        line = scorer.score("", read_prompt(edge, asked(prompt)), target_ids, PARAMS)
        scorer.close()
        drafted = sum(mine == theirs for mine, theirs in zip(line.drafted, line.choices, strict=True))
        yield {"prompt": prompt, "texts": 1, "agreed": drafted, "tokens": len(target_ids)}


def kept(path: Path, make: Callable[[Sequence[str]], Iterator[Row]], prompts: Sequence[str]) -> list[Row]:
    """The rows of a file, one for each prompt in their order; those that are not there are made."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    rows = {row["prompt"]: row for row in map(json.loads, lines)}
    missing = [prompt for prompt in prompts if prompt not in rows]
    with path.open("a", encoding="utf-8") as file:
        for number, row in enumerate(make(missing), 1):
            rows[row["prompt"]] = row
            print(json.dumps(row, ensure_ascii=False), file=file, flush=True)
            print(f"{path.stem}: {number} of {len(missing)}", end="\r", flush=True)
    return [rows[prompt] for prompt in prompts]


def show(title: str, before: list[Row], after: list[Row]) -> None:
    """A line each figure: before, after, and the paired difference with its interval."""
    print(f"\n{title}, {len(before)} prompts")
    resamples = Resamples(len(before))
    for name, (part, whole) in FIGURES.items():
        if any(part not in row for row in (*before, *after)):
            continue
        sides = [
            tuple(np.array([row[key] for row in rows], float) for key in (part, whole)) for rows in (after, before)
        ]
        values = [side[0].sum() / max(side[1].sum(), 1) for side in sides]
        low, high = difference(resamples, (sides[0][0], sides[0][1]), (sides[1][0], sides[1][1]))
        print(f"{name:<28}{values[1]:>9.4f}{values[0]:>9.4f}  {values[0] - values[1]:+.4f} [{low:+.4f}, {high:+.4f}]")
    both = [row for row in (*before, *after) if "lossless_same" in row]
    if both:
        same, total = (sum(row[key] for row in both) for key in ("lossless_same", "tokens"))
        print(f"lossless, before and after: {same} of {total} tokens are those of cloud")


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("learn-bench"))
    parser.add_argument("--sizes", default="30,60,120,240")
    parser.add_argument("--held-out", type=int, default=60)
    parser.add_argument("--dev", type=int, default=62, help="prompts of the dev set; 0 leaves it out")
    parser.add_argument("--alpha", action="store_true", help="measure α alone, and calibrate nothing")
    add_settings(parser)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    sizes = sorted(int(size) for size in given.sizes.split(","))
    prompts, held_out = prompts_of(PRODUCTS), prompts_of(PRODUCTS)[-given.held_out :]
    dev = prompts_of(DEV)[: given.dev]
    with closing(skydraft.load(given.cloud_model)) as cloud:
        with closing(skydraft.load(given.edge_model)) as edge:
            collect(given.out / "lessons", edge, cloud, prompts[: sizes[-1]])
            before = _both(given, "before", edge, cloud, held_out, dev)
        for size in sizes:
            name = f"{size}-{setting_of(given)}"
            adapter = learned(given, size, prompts, name, calibrates=not given.alpha)
            if adapter is None:
                continue
            with closing(skydraft.load(given.edge_model, EngineOptions(adapter=adapter))) as trained:
                after = _both(given, name, trained, cloud, held_out, dev if size == sizes[-1] else [])
            show(f"{size} answers: held-out prompts of the domain", before[0], after[0])
            if after[1]:
                show(f"{size} answers: the dev set of mixed prompts", before[1], after[1])


def add_settings(parser: argparse.ArgumentParser) -> None:
    """The pair, and how its draft model is trained."""
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--layers", type=int, help="as `learn train` chooses, unless given")
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--edge-model", default=default_pair().draft)
    parser.add_argument("--cloud-model", default=default_pair().target)


def setting_of(given: argparse.Namespace) -> str:
    """The name of a training setting: what is not the default of `learn train`."""
    rate = "" if given.rate == RATE else f"-rate{given.rate:g}"
    epochs = "" if given.epochs == EPOCHS else f"-epochs{given.epochs}"
    return f"layers{given.layers or ''}{rate}{epochs}"


def _both(
    given: argparse.Namespace, name: str, edge: Engine, cloud: Engine, held_out: Sequence[str], dev: Sequence[str]
) -> tuple[list[Row], list[Row]]:
    alone = partial(agreement_alone, edge, cloud)
    whole = partial(measure, edge, cloud, skydraft.api.is_calibrated(edge, cloud))
    kind, make = ("held-out-alpha", alone) if given.alpha else ("held-out", whole)
    return (kept(given.out / f"{name}-{kind}.jsonl", make, held_out), kept(given.out / f"{name}-dev.jsonl", alone, dev))


def learned(
    given: argparse.Namespace, size: int, prompts: Sequence[str], name: str, *, calibrates: bool = True
) -> Path | None:
    """An adapter with what was learned of the first `size` prompts; None where nothing was kept."""
    adapter = given.out / f"adapter-{name}.gguf"
    models = ["--edge-model", given.edge_model, "--cloud-model", given.cloud_model]
    with closing(skydraft.load(given.edge_model)) as edge:
        folder = part_of(given.out / "lessons", size, edge, prompts)
    if not adapter.is_file():
        how = ["--out", str(adapter), "--minutes", str(given.minutes)]
        how += ["--rate", str(given.rate), "--epochs", str(given.epochs)]
        how += ["--layers", str(given.layers)] if given.layers else []
        if run(["learn", "train", str(folder), *how, *models]):
            print(f"{size} answers: nothing was kept", file=sys.stderr)
            return None
    if calibrates and run(["learn", "calibrate", str(folder), *models, "--edge-adapter", str(adapter)]):
        print(f"{size} answers: not calibrated", file=sys.stderr)
    return adapter


if __name__ == "__main__":
    main()
