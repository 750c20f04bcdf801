"""Training: next-token loss on captions, whose wording is drawn anew every time that a clip is seen."""

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from recipes.tiny_omni.batches import IGNORED, NO_DECISION, Example, decision_shares, training_inputs
from recipes.tiny_omni.captions import DEFAULT_PROMPT, PROMPTS, caption

_DEFAULT_PROMPT_SHARE = 0.7
_WARMUP_SHARE = 0.05
_REPORTED_STEPS = 50
_BATCHES_PER_POOL = 16  # clips are sorted by length within a pool, so that batches need little padding


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and on how much a model is trained. `num_clips` are the first ones of the training set."""

    num_clips: int
    num_steps: int
    batch_size: int
    learning_rate: float
    # Tokens that decide a class are one in ten, and the rest of a caption is learned within a few hundred steps.
    decision_weight: float
    seed: int


EDGE_SCHEDULE = Schedule(num_clips=1500, num_steps=900, batch_size=16, learning_rate=2e-3, decision_weight=3.0, seed=11)
CLOUD_SCHEDULE = Schedule(
    num_clips=6000, num_steps=2500, batch_size=16, learning_rate=1.5e-3, decision_weight=3.0, seed=12
)


def train(
    model: Any, tokenizer: Any, examples: list[Example], schedule: Schedule, report: Callable[[str], None]
) -> float:
    """Train `model` in place and return the CPU seconds it took, summed over threads."""
    import torch

    started = time.process_time()
    optimizer = torch.optim.AdamW(_groups(model), lr=schedule.learning_rate, betas=(0.9, 0.98))
    shares = decision_shares(tokenizer)
    model.train()
    recent: list[float] = []
    for step, batch in enumerate(_batches(examples[: schedule.num_clips], schedule)):
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate * _rate(step, schedule.num_steps)
        inputs, labels, decisions = training_inputs(tokenizer, batch)
        logits = model(**inputs, use_cache=False).logits
        loss = _loss(logits, labels, decisions, shares, schedule.decision_weight)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent.append(loss.item())
        if len(recent) == _REPORTED_STEPS:
            seconds = time.process_time() - started
            report(f"step {step + 1}/{schedule.num_steps} loss {fmean(recent):.3f} {seconds:.0f} CPU s")
            recent.clear()
    model.eval()
    return time.process_time() - started


def _loss(logits: Any, labels: Any, decisions: Any, shares: Any, decision_weight: float) -> Any:
    """Mean next-token loss, where the tokens that decide a class weigh more.

    At these the label is not the one word that was drawn but the shares of all words of the class: the same loss on
    average, without the noise of the draw. All are [batch, length, ...], `shares` is [num_decisions, vocab].
    """
    log_probs = logits[:, :-1].log_softmax(-1)
    labels, decisions = labels[:, 1:], decisions[:, 1:]
    deciding = decisions != NO_DECISION
    plain = (labels != IGNORED) & ~deciding
    plain_loss = -log_probs[plain].gather(-1, labels[plain][:, None]).sum()
    deciding_loss = -(shares[decisions[deciding]] * log_probs[deciding]).sum()
    return (plain_loss + decision_weight * deciding_loss) / (plain.sum() + decision_weight * deciding.sum())


def _groups(model: Any) -> list[dict[str, Any]]:
    """Weight decay for matrices only. The vision tower is never fed and keeps its first weights."""
    used = [parameter for name, parameter in model.named_parameters() if ".visual." not in name]
    return [
        {"params": [parameter for parameter in used if parameter.ndim > 1], "weight_decay": 0.02},
        {"params": [parameter for parameter in used if parameter.ndim <= 1], "weight_decay": 0.0},
    ]


def _rate(step: int, num_steps: int) -> float:
    """Share of the full learning rate: a linear start, then half a cosine down to nearly nothing."""
    warmup = max(1, int(_WARMUP_SHARE * num_steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup)))


def _batches(examples: list[Example], schedule: Schedule) -> Iterator[list[tuple[Example, str, str]]]:
    rng = random.Random(schedule.seed)
    orders = _orders(len(examples), [example.mel.shape[1] for example in examples], schedule.batch_size, rng)
    for _ in range(schedule.num_steps):
        chosen = [examples[index] for index in next(orders)]
        yield [(example, _prompt(rng), caption(example.attributes, rng.getrandbits(32))) for example in chosen]


def _orders(count: int, lengths: list[int], batch_size: int, rng: random.Random) -> Iterator[list[int]]:
    """Endless batches of indices: every clip once per pass, similar lengths together, batches in random order."""
    while True:
        order = list(range(count))
        rng.shuffle(order)
        batches = []
        for start in range(0, count, batch_size * _BATCHES_PER_POOL):
            pool = sorted(order[start : start + batch_size * _BATCHES_PER_POOL], key=lengths.__getitem__)
            batches += [pool[first : first + batch_size] for first in range(0, len(pool), batch_size)]
        rng.shuffle(batches)
        yield from batches


def _prompt(rng: random.Random) -> str:
    return DEFAULT_PROMPT if rng.random() < _DEFAULT_PROMPT_SHARE else rng.choice(PROMPTS[1:])
