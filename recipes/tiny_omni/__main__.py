"""The recipe: python -m recipes.tiny_omni [clips | heldout | train | evaluate]. Without a command, everything.

python -m recipes.tiny_omni clips --count 100 --seed 7 --out out/clips
python -m recipes.tiny_omni train --only edge
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from recipes.tiny_omni.card import write_cards
from recipes.tiny_omni.clips import make_clips, make_held_out, write_clips
from recipes.tiny_omni.evaluate import Answer, evaluate, load_held_out
from recipes.tiny_omni.models import CLOUD, EDGE, build_model
from recipes.tiny_omni.tokenizer import build_tokenizer, save_tokenizer
from recipes.tiny_omni.train import CLOUD_SCHEDULE, EDGE_SCHEDULE, train

ROOT = Path(__file__).parents[2]
HELD_OUT = ROOT / "data" / "speech_zh_heldout"
MODELS = ROOT / "skydraft" / "models" / "tiny_omni"
RESULTS = "results.json"
SIDES = {"edge": (EDGE, EDGE_SCHEDULE), "cloud": (CLOUD, CLOUD_SCHEDULE)}
TRAINING_SEED, HELD_OUT_SEED = 20_250, 77
NUM_HELD_OUT = 60


def main() -> None:
    """Parse the command line and run."""
    options = _parser().parse_args()
    sides = [options.only] if options.only else list(SIDES)
    if shutil.which("espeak-ng") is None and options.command != "evaluate":
        sys.exit("The clips are spoken by espeak-ng, which is not installed. Run: apt-get install espeak-ng")
    if options.command == "clips":
        if options.out is None:
            sys.exit("Say where the clips should go: --out DIR")
        clips = make_clips(options.count, options.seed, held_out=options.held_out)
        _say(f"{write_clips(clips, options.out)} clips in {options.out}")
    if options.command in ("heldout", "all"):
        _say(f"{write_clips(make_held_out(NUM_HELD_OUT, HELD_OUT_SEED), HELD_OUT)} clips in {HELD_OUT}")
    if options.command in ("train", "all"):
        _train_sides(sides, options.threads, options.out)
    if options.command in ("evaluate", "all"):
        _evaluate_sides(sides, options.threads, options.out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m recipes.tiny_omni", description=__doc__)
    parser.add_argument("command", nargs="?", default="all", choices=("all", "clips", "heldout", "train", "evaluate"))
    parser.add_argument("--count", type=int, default=100, help="clips: how many")
    parser.add_argument("--seed", type=int, default=1, help="clips: seed of the set")
    parser.add_argument("--held-out", action="store_true", help="clips: of sentences that training never speaks")
    parser.add_argument("--out", type=Path, help="clips: the folder to write; else: the folder of the models")
    parser.add_argument("--only", choices=tuple(SIDES), help="train, evaluate: one of the models")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    return parser


def _train_sides(sides: Iterable[str], num_threads: int, out: Path | None) -> None:
    import torch

    from recipes.tiny_omni.batches import build_extractor, examples_of

    torch.set_num_threads(num_threads)
    tokenizer = build_tokenizer()
    started = time.monotonic()
    examples = examples_of(make_clips(max(SIDES[side][1].num_clips for side in sides), TRAINING_SEED))
    _say(f"{len(examples)} training clips in {time.monotonic() - started:.0f} s")
    for side in sides:
        size, schedule = SIDES[side]
        torch.manual_seed(schedule.seed)
        model = build_model(size, tokenizer)
        seconds = train(model, tokenizer, examples, schedule, partial(_say_of, side))
        folder = (out or MODELS) / side
        model.save_pretrained(folder)
        save_tokenizer(tokenizer, folder)
        build_extractor().save_pretrained(folder)
        _note(folder, {"train_cpu_s": round(seconds), "parameters": sum(p.numel() for p in model.parameters())})
        _say(f"{side}: trained in {seconds:.0f} CPU s, in {folder}")


def _evaluate_sides(sides: Iterable[str], num_threads: int, out: Path | None) -> None:
    import torch
    from transformers import AutoTokenizer, Qwen2_5OmniThinkerForConditionalGeneration

    torch.set_num_threads(num_threads)
    examples = load_held_out(HELD_OUT)
    for side in sides:
        folder = (out or MODELS) / side
        model = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(folder).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        measured = evaluate(model, tokenizer, examples, _show)
        _note(folder, measured)
        _say(f"{side}: {json.dumps(measured)}")
    if out is None:
        write_cards(MODELS, clips_seed=TRAINING_SEED, held_out_seed=HELD_OUT_SEED)


def _show(answer: Answer) -> None:
    wrong = [name for name, right in answer.right().items() if not right]
    _say(f"{answer.text}  {'wrong: ' + ', '.join(wrong) if wrong else 'right'}")


def _note(folder: Path, facts: dict[str, Any]) -> None:
    """Add measured facts to the results of a model, which its card is written from."""
    file = folder / RESULTS
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.write_text(json.dumps(known | facts, indent=2) + "\n", encoding="utf-8")


def _say_of(side: str, line: str) -> None:
    _say(f"{side}: {line}")


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
