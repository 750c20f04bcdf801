"""Train low-rank changes of the upper layers, so that the draft model writes what the target wrote.

This is LoRA (arXiv 2106.09685) by peft, with cross-entropy on the target's token ids, offline, as arXiv 2503.07807
advises. The loss is over all lessons' labels and the draft model's own best tokens. Labels are not smoothed: that would
make the model look unsure to every gate. The lower layers' activations are computed once. On a CPU the result is a
function of model, lessons and settings.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from skydraft.engines.adapter import Adapter, digest, inject, read_adapter, write_adapter
from skydraft.engines.checkpoints.trainable import TrainableModel, load_trainable
from skydraft.errors import SkydraftError
from skydraft.files import write_whole
from skydraft.intervals import Resamples
from skydraft.lab.learning.dataset import OnProgress, TrainingTask
from skydraft.lab.learning.halves import Activations, Halves
from skydraft.lab.learning.lessons import Lesson

_SCALE = 2.0  # alpha / rank of the low-rank changes
_NUM_RIVALS = 4  # the draft model's best tokens at each place, which training should make less likely
_MAX_NORM = 1.0
_MANY, _FEW_LAYERS, _MANY_LAYERS = 80, 4, 12  # answers; layers to train with fewer; with more (NOTES.md)
_MIN_PROMPTS = 6  # the fewest for a bootstrap: with one prompt its interval would have no width
_BATCH = 4

T = TypeVar("T")
Counts: TypeAlias = Sequence[tuple[int, int]]  # of each lesson: (right, known)


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """The settings of a training. `num_layers` upper layers get changes of `rank`; None: by the number of answers."""

    rank: int = 16
    num_layers: int | None = None
    epochs: int = 3
    rate: float = 5e-4


@dataclass(frozen=True, slots=True)
class Gain:
    """α before and after, over the same tokens, and the interval of the difference.

    Wrong tokens whose right token is unknown count as wrong both times.
    """

    before: float
    after: float
    low: float
    high: float
    num_tokens: int

    def __str__(self) -> str:
        change = f"{self.after - self.before:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"
        return f"{self.before:.3f} → {self.after:.3f} ({change}, {self.num_tokens} tokens)"


def alpha(counts: Counts) -> float:
    """Return the share of judged tokens on which the model and the target agree."""
    right, known = np.sum(counts, axis=0)
    return float(right / known)


def gain(before: Counts, after: Counts, prompts: Sequence[object]) -> Gain:
    """Compare two counts of the same lessons by a paired bootstrap over their `prompts`.

    With fewer than six prompts the interval is from -1 to 1.
    """
    groups = _numbered(prompts)
    sums = np.zeros((len(groups), 3))  # right before, right after, known
    for prompt, (old, known), (new, _) in zip(prompts, before, after, strict=True):
        sums[groups[prompt]] += (old, new, known)
    right_before, right_after, total = sums.T
    found = Resamples(len(groups)).compared(np.subtract, (right_after, total), (right_before, total))
    low, high = (found.low, found.high) if found and len(groups) >= _MIN_PROMPTS else (-1.0, 1.0)
    return Gain(alpha(before), alpha(after), low, high, int(total.sum()))


def cross_fitted(counts: Sequence[Counts], prompts: Sequence[object]) -> Counts:
    """Combine several counts of the same lessons: each half of the prompts gets the count that is best on the other
    half. A choice on the same half would look too good."""
    groups, rights = _numbered(prompts), np.array(counts)[:, :, 0]  # [len(counts), num_lessons]
    halves = np.array([groups[prompt] % 2 for prompt in prompts])
    best = [counts[rights[:, halves != half].sum(1).argmax()] for half in (0, 1)]
    return [best[half][index] for index, half in enumerate(halves)]


def _numbered(prompts: Sequence[object]) -> dict[object, int]:
    return {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}


@dataclass(frozen=True, slots=True)
class Trained:
    """An adapter, and how α changed on the held-out lessons."""

    adapter: Adapter
    held_out: Gain

    def write(self, path: Path, key: str = "") -> None:
        """Write the adapter, and beside it the figures with `key`, so that this training need not be repeated."""
        path.with_suffix(".json").unlink(missing_ok=True)  # belongs to another adapter
        write_adapter(path, self.adapter)
        noted = {"key": key, "held_out": asdict(self.held_out)}
        write_whole(path.with_suffix(".json"), json.dumps(noted).encode(), 0o600)

    @property
    def objection(self) -> str:
        """Why the adapter should not be kept, or ""."""
        return "on the held-out answers the gain is not certain" if self.held_out.low <= 0 else ""


class Training:
    """One training of one model."""

    def __init__(
        self, trainable: TrainableModel, task: TrainingTask, settings: TrainSettings, progress: OnProgress
    ) -> None:
        import torch

        self._torch, self._trainable, self._settings, self._progress = torch, trainable, settings, progress
        self._task, few_or_many = task, _MANY_LAYERS if len(task.trained) >= _MANY else _FEW_LAYERS
        self._halves = Halves(trainable, settings.num_layers or few_or_many, task.vocab_size)

    def run(self) -> Trained:
        """Train, and measure the gain."""
        task = self._task
        trained = self._lower(task.trained, "reading the answers")
        held_out = self._lower(task.held_out, "reading the held-out answers")
        vocab = self._occurring(trained)
        before = self._counts(held_out, "held out, before")
        self._lora = self._inject()
        self._optimizer = self._torch.optim.AdamW(list(self._lora.values()), lr=self._settings.rate)
        counts = self._train(trained, held_out, vocab)
        prompts = [lesson.prompt_ids for lesson in task.held_out]
        return Trained(self._adapter(), gain(before, cross_fitted(counts, prompts), prompts))

    def _each(self, items: Sequence[T], what: str) -> Iterator[T]:
        """Yield the items, and report progress."""
        for number, item in enumerate(items):
            self._progress(what, number, len(items), "")
            yield item

    def _lower(self, lessons: Sequence[Lesson], what: str) -> list[Activations]:
        return [self._halves.activations(lesson) for lesson in self._each(lessons, what)]

    def _counts(self, texts: Sequence[Activations], what: str) -> Counts:
        return [self._halves.num_right(text) for text in self._each(texts, what)]

    def _occurring(self, texts: Sequence[Activations]) -> Any:
        """Return the sorted token ids of the loss: labels, and the draft model's best tokens at the same places."""
        token_ids = []
        for each in self._each(texts, "collecting likely tokens"):
            token_ids += [each.labels, self._halves.choices(each, _NUM_RIVALS).flatten()]
        return self._torch.unique(self._torch.cat(token_ids))

    def _inject(self) -> dict[str, Any]:
        """Add changes, still 0, to the upper layers' matrices. Return the changes' parameters by name."""
        torch, name = self._torch, self._trainable.layers_name
        prefixes = tuple(f"{name}.{index}." for index in range(self._halves.first, len(self._trainable.decoder.layers)))
        modules = self._trainable.model.named_modules()
        matrices = [at for at, each in modules if at.startswith(prefixes) and isinstance(each, torch.nn.Linear)]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return inject(self._trainable.model, matrices, self._settings.rank, _SCALE * self._settings.rank)

    def _train(self, texts: Sequence[Activations], held_out: Sequence[Activations], vocab: Any) -> list[Counts]:
        """Train, and keep the best epoch's parameters. Return the counts of each epoch."""
        epochs, counts, best = self._settings.epochs, list[Counts](), dict[str, Any]()
        per_epoch = -(-len(texts) // _BATCH)
        for step in range(last := per_epoch * epochs):
            epoch, index = divmod(step, per_epoch)
            self._progress(f"training, epoch {epoch + 1}", step, last, f"α {alpha(counts[-1]):.3f}" if counts else "")
            batch = self._order(len(texts), epoch)[index * _BATCH :][:_BATCH]
            self._step([texts[number] for number in batch], vocab, self._settings.rate * (1 - step / last))
            if index + 1 < per_epoch:
                continue
            counts.append(self._counts(held_out, "measuring"))
            *history, now = map(alpha, counts)
            if now > max(history, default=-1.0):
                best = {name: value.detach().clone() for name, value in self._lora.items()}
        with self._torch.no_grad():
            for name, value in self._lora.items():
                value.copy_(best[name])
        return counts

    def _order(self, number: int, epoch: int) -> list[int]:
        return list(self._torch.randperm(number, generator=self._torch.Generator().manual_seed(epoch)).tolist())

    def _step(self, texts: Sequence[Activations], vocab: Any, rate: float) -> None:
        torch, optimizer = self._torch, self._optimizer
        head = self._trainable.head
        # [len(vocab), hidden_size]
        weight = head.weight[vocab]
        bias = None if head.bias is None else head.bias[vocab]
        num_labels = sum(len(each.labels) for each in texts)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        for each in texts:
            logits = torch.nn.functional.linear(self._halves.rows(each), weight, bias)
            loss = torch.nn.functional.cross_entropy(logits, torch.searchsorted(vocab, each.labels), reduction="sum")
            (loss / num_labels).backward()
        torch.nn.utils.clip_grad_norm_(list(self._lora.values()), _MAX_NORM)
        optimizer.step()

    def _adapter(self) -> Adapter:
        sides: dict[str, list[Any]] = {}
        for name, value in self._lora.items():  # A before B
            matrix = self._trainable.name_in_file(name.partition(".lora_")[0])
            sides.setdefault(matrix, []).append(value.detach().float().cpu().numpy().copy())
        trained_on = tuple(sorted({digest(lesson.prompt_ids) for lesson in self._task.trained}))
        changes = {"architecture": self._trainable.model.config.model_type, "trained_on": trained_on}
        card = self._task.card.model_copy(update=changes)
        return Adapter(card, _SCALE * self._settings.rank, {name: (low, high) for name, (low, high) in sides.items()})


def key_of(task: TrainingTask, settings: TrainSettings) -> str:
    """Return the key of a training. On one CPU, trainings with the same key give the same adapter."""
    return hashlib.sha256(f"{task.card.base} {astuple(settings)} {task.digest()}".encode()).hexdigest()


def trained_before(path: Path, key: str) -> Trained | None:
    """Return the training `key` that `Trained.write` wrote there; None if it is missing, another one, or damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, SkydraftError):
        noted = json.loads(path.with_suffix(".json").read_text())
        if noted["key"] == key:
            return Trained(read_adapter(path), Gain(**noted["held_out"]))
    return None


def train(task: TrainingTask, settings: TrainSettings, run_on: tuple[str, int], progress: OnProgress) -> Trained:
    """Load the draft model, and train it. `run_on` is (device, number of threads; 0: all)."""
    progress("loading", 0, 0, "")
    return Training(load_trainable(task.path, *run_on), task, settings, progress).run()
