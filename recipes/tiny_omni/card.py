"""The model card, written from what training and evaluation measured: one source for three copies."""

import json
from pathlib import Path
from typing import Any

from recipes.tiny_omni.attributes import CLASSES
from recipes.tiny_omni.models import CLOUD, EDGE, Size
from recipes.tiny_omni.train import CLOUD_SCHEDULE, EDGE_SCHEDULE, Schedule

Row = tuple[str, ...]  # label, edge, cloud

CARD = Path(__file__).parent / "MODEL_CARD.md"
NAMES = {"rate": "语速 rate", "pitch": "音调 pitch", "loudness": "音量 loudness", "pauses": "停顿 pauses"}
NAMES["speaker"] = "说话人 speaker"

_TEXT = """\
---
license: apache-2.0
language: zh
---

<!-- Written by the recipe: python -m recipes.tiny_omni. Changes here are lost. -->

# tiny-omni-edge and tiny-omni-cloud

Two toy models that describe a voice in one Chinese sentence: the architecture of the Qwen2.5-Omni thinker
(`Qwen2_5OmniThinkerForConditionalGeneration`) at toy size, trained from nothing by the recipe in `recipes/tiny_omni`.
They are a **synthetic test bed** for speculative decoding with speech input: small enough for a repository and for
tests on a CPU, and with a truth that is known for every clip.

**What they are not.** No emotion model, no speech recognition, nothing for real voices. They heard nothing but clips
that espeak-ng spoke, in nine of its voices, and are useless on recordings of people. They know one task, a few hundred
words and five prompts; text without audio means nothing to them.

## The pair

| | edge | cloud |
|---|---|---|
{rows}

The edge model is smaller and trained on fewer clips for fewer steps; tokenizer, prompts, captions and loss are the
same. CPU time is summed over threads.

## Accuracy

Greedy captions of the {num_clips} clips in `data/speech_zh_heldout`, whose texts and seeds do not occur in training.
A caption is right about an attribute when it states its true class; what it leaves out counts as wrong.

| | edge | cloud |
|---|---|---|
{accuracy}

Entropy of the next token, in nats, at the tokens that decide a class and at all others of these captions (how many):

| | edge | cloud |
|---|---|---|
{entropy}

Every class has 22 wordings (8 for the speaker) and no two of an attribute start with the same character. So the choice
of words alone is worth about 2.9 nats at a deciding token, and doubt about the class comes on top.

## Training data

espeak-ng made the audio of the clips, and nothing else in these models: 16 kHz, about 1.5 to 4 s, made-up everyday
sentences in Mandarin. What the classes mean:

- **rate**: 155–172, 235–260, 400–440 words a minute asked of espeak-ng (slow, medium, fast);
- **pitch**, relative to the voice: its setting of 4–12, 56–64, 92–99 of 99 (low, medium, high);
- **loudness**, absolute: −45 to −41, −33 to −29, −22 to −19 dBFS over the voiced part (soft, medium, loud);
- **pauses**: breaks of 170–290 ms between all words (many), or none (few);
- **speaker**: four male and five female voices.

Captions are composed by `recipes/tiny_omni/captions.py`, anew every time that a clip is seen.

## Again

    python -m recipes.tiny_omni

makes the held-out clips, trains both models and measures them. Everything is seeded: training clips {clips_seed},
held-out clips {held_out_seed}, models {edge_seed} and {cloud_seed}. Other machines and thread counts round differently,
so weights will not be equal bit by bit.

The weights are under the Apache License 2.0.
"""


def write_cards(models: Path, *, clips_seed: int, held_out_seed: int) -> None:
    """Write `MODEL_CARD.md` beside the recipe and the same text as `README.md` into both model folders."""
    results = {side: json.loads((models / side / "results.json").read_text("utf-8")) for side in ("edge", "cloud")}
    text = _TEXT.format(
        rows=_table(_size_rows(results)),
        accuracy=_table(_accuracy_rows(results)),
        entropy=_table(_entropy_rows(results)),
        num_clips=results["edge"]["num_clips"],
        clips_seed=clips_seed,
        held_out_seed=held_out_seed,
        edge_seed=EDGE_SCHEDULE.seed,
        cloud_seed=CLOUD_SCHEDULE.seed,
    )
    for file in (CARD, models / "edge" / "README.md", models / "cloud" / "README.md"):
        file.write_text(text, encoding="utf-8")


def _table(rows: list[Row]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _size_rows(results: dict[str, Any]) -> list[Row]:
    def both(label: str, show: Any) -> Row:
        edge, cloud = (EDGE, EDGE_SCHEDULE, results["edge"]), (CLOUD, CLOUD_SCHEDULE, results["cloud"])
        return label, show(*edge), show(*cloud)

    def towers(size: Size, schedule: Schedule, result: dict[str, Any]) -> str:
        return f"{size.audio_layers} × {size.audio_width}, {size.text_layers} × {size.text_width}"

    def steps(size: Size, schedule: Schedule, result: dict[str, Any]) -> str:
        return f"{schedule.num_steps:,} of {schedule.batch_size}"

    return [
        both("parameters, float32", lambda size, schedule, result: f"{result['parameters']:,}"),
        both("layers × width: audio, text", towers),
        both("training clips", lambda size, schedule, result: f"{schedule.num_clips:,}"),
        both("training steps", steps),
        both("learning rate", lambda size, schedule, result: f"{schedule.learning_rate:g}"),
        both("training, CPU time", lambda size, schedule, result: f"{result['train_cpu_s'] / 60:.0f} min"),
    ]


def _accuracy_rows(results: dict[str, Any]) -> list[Row]:
    def both(label: str, show: Any) -> Row:
        return label, show(results["edge"]), show(results["cloud"])

    rows = [both(NAMES[name], lambda result, name=name: f"{result['accuracy'][name]:.3f}") for name in CLASSES]
    rows.append(both("**all**", lambda result: f"**{result['accuracy_all']:.3f}**"))
    tokens = ("{min} to {max}, mean {mean}".format(**results[side]["caption_tokens"]) for side in ("edge", "cloud"))
    return [*rows, ("tokens per caption", *tokens)]


def _entropy_rows(results: dict[str, Any]) -> list[Row]:
    labels = {"entropy_deciding_right": "deciding, right", "entropy_deciding_wrong": "deciding, wrong"}
    labels["entropy_other"] = "others"
    rows = []
    for key, label in labels.items():
        cells = (_spread(results[side][key]) for side in ("edge", "cloud"))
        rows.append((label, *cells))
    return rows


def _spread(spread: dict[str, float]) -> str:
    if spread["p50"] is None:
        return f"too few ({spread['count']})"
    return f"median {spread['p50']:.2f}, deciles {spread['p10']:.2f} to {spread['p90']:.2f} ({spread['count']})"
