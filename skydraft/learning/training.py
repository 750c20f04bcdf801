"""Training: low-rank changes of the upper layers, so that the draft model says what the target said.

LoRA (arXiv 2106.09685) by peft, cross-entropy on the target's tokens with label smoothing over the vocabulary that
occurs: the labels, and what the draft model would have said. On token ids alone, offline, as arXiv 2503.07807 advises.
The lower layers' activations are computed once. On a CPU the result is a function of model, lessons and settings,
whether it was stopped in between or not.
"""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from skydraft.engines.base import Engine
from skydraft.engines.trainable import TrainableModel, check_trainable, load_trainable
from skydraft.errors import OptionError
from skydraft.learning.adapter import Adapter, AdapterCard, write_whole
from skydraft.learning.dataset import prompt_digest
from skydraft.learning.gain import Counts, Gain, alpha, gain
from skydraft.learning.halves import MAX_LEN, Activations, Halves
from skydraft.learning.lesson import Lesson, encode
from skydraft.learning.merge import file_of

MAX_GUARD_LOSS = 0.01
_NUM_RIVALS = 4  # of the draft model's own best tokens at each place, which are to become less likely
_MAX_NORM = 1.0
_SAVE_EVERY = 4  # steps


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How to train. `num_layers` upper layers get changes of `rank`; `minutes` 0 is no limit. Raises OptionError."""

    rank: int = 16
    num_layers: int = 4
    epochs: int = 4
    batch: int = 8
    rate: float = 1.5e-4
    smoothing: float = 0.05
    seed: int = 0
    minutes: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("num_layers", 1), ("epochs", 1), ("batch", 1), ("minutes", 0)):
            if getattr(self, name) < least:
                flag = name.removeprefix("num_").replace("_", "-")
                raise OptionError(f"--{flag} must be {least} or more, not {getattr(self, name):g}.")
        if not 0 < self.rate < 1:
            raise OptionError(f"--rate must be above 0 and below 1, not {self.rate:g}.")


def usual_layers(num_trained: int) -> int:
    """How many upper layers learn from so many answers, unless the user says it.

    Of 200 answers 12 of 24 layers learned more than 4, and forgot less; of 50 nothing that was certain (NOTES.md).
    """
    return 12 if num_trained >= 150 else 4


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Lessons to train with, held out, and of the guard."""

    trained: Sequence[Lesson]
    held_out: Sequence[Lesson]
    guard: Sequence[Lesson]

    def digest(self) -> str:
        """A name for exactly these."""
        total = hashlib.sha256()
        for part in (self.trained, self.held_out, self.guard):
            for lesson in part:
                total.update(encode(lesson))
            total.update(b"|")
        return total.hexdigest()


@dataclass(frozen=True, slots=True)
class Trained:
    """An adapter, and what it did to α on the held-out lessons and on the guard's, if there is one."""

    adapter: Adapter
    held_out: Gain
    guard: Gain | None
    is_whole: bool  # not cut short by a limit on time

    @property
    def objection(self) -> str:
        """Why it should not be kept; "" where it should."""
        if self.held_out.low <= 0:
            return "on the held-out answers the gain is not certain"
        if self.guard is not None and self.guard.difference < -MAX_GUARD_LOSS:
            return f"on general prompts it is worse by more than {MAX_GUARD_LOSS:g}"
        return ""


# What is under way, how much of it is done, of how much, and a note: "α 0.71".
OnProgress = Callable[[str, int, int, str], None]


@dataclass
class _State:
    """What a training that was stopped goes on from."""

    step: int = 0
    history: list[float] = field(default_factory=list)  # α on the held-out lessons after each epoch
    best: dict[str, Any] | None = None
    best_alpha: float = -1.0


class Training:
    """One training of one model, from its beginning or from what a stopped one left in the file `state`."""

    def __init__(
        self, trainable: TrainableModel, data: TrainingData, settings: TrainSettings, card: AdapterCard,
        vocab_size: int, state: Path, progress: OnProgress,
    ) -> None:  # fmt: skip
        import torch

        self._torch, self._trainable, self._settings = torch, trainable, settings
        self._card, self._path, self._progress = card, state, progress
        self._deadline = time.monotonic() + 60 * settings.minutes if settings.minutes else float("inf")
        self._key = hashlib.sha256(f"{card.base} {astuple(settings)[:-1]} {data.digest()}".encode()).hexdigest()
        self._halves = Halves(trainable, settings.num_layers, vocab_size)
        self._data = TrainingData(*(_short(part) for part in (data.trained, data.held_out, data.guard)))
        self._state = _State()

    def run(self) -> Trained:
        """Train, and measure. What is not done when time is over, or at Ctrl-C, can be gone on with."""
        trained = self._lower(self._data.trained, "reading what to learn")
        held_out = self._lower(self._data.held_out, "reading what is held out")
        guard = self._lower(self._data.guard, "reading the guard")
        before = self._counts(held_out, "held out, before"), self._counts(guard, "guard, before")
        vocab = self._occurring(trained)
        self._inject()
        self._optimizer = self._torch.optim.AdamW(list(self._lora().values()), lr=self._settings.rate)
        self._resume()
        is_whole = self._train(trained, held_out, vocab)
        self._put(self._state.best or {})
        after = self._counts(held_out, "held out, after"), self._counts(guard, "guard, after")
        held_gain = gain(before[0], after[0], [lesson.prompt_ids for lesson in self._data.held_out])
        guard_gain = gain(before[1], after[1], [each.prompt_ids for each in self._data.guard]) if guard else None
        return Trained(self._adapter(held_gain, guard_gain), held_gain, guard_gain, is_whole)

    def _lower(self, lessons: Sequence[Lesson], what: str) -> list[Activations]:
        found = []
        for number, lesson in enumerate(lessons):
            self._progress(what, number, len(lessons), "")
            found.append(self._halves.activations(lesson))
        return found

    def _counts(self, texts: Sequence[Activations], what: str) -> Counts:
        counts: list[tuple[int, int]] = []
        for number, each in enumerate(texts):
            self._progress(what, number, len(texts), f"α {alpha(counts):.3f}" if counts else "")
            counts += self._halves.num_right([each])
        return counts

    def _occurring(self, texts: Sequence[Activations]) -> Any:
        """The token ids that the loss is over, rising: labels, and the draft model's own best at the same places."""
        found = []
        for number, each in enumerate(texts):
            self._progress("looking for rivals", number, len(texts), "")
            found += [each.labels, self._halves.choices(each, _NUM_RIVALS).flatten()]
        return self._torch.unique(self._torch.cat(found))

    def _inject(self) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        torch, name = self._torch, self._trainable.layers_name
        prefixes = tuple(f"{name}.{index}." for index in range(self._halves.first, len(self._trainable.layers)))
        targets = [
            name
            for name, module in self._trainable.model.named_modules()
            if name.startswith(prefixes) and isinstance(module, torch.nn.Linear)
        ]
        rank = self._settings.rank
        config = LoraConfig(r=rank, lora_alpha=round(self._card.scale * rank), target_modules=targets, lora_dropout=0.0)
        with torch.random.fork_rng():
            torch.manual_seed(self._settings.seed)
            inject_adapter_in_model(config, self._trainable.model)

    def _lora(self) -> dict[str, Any]:
        """The parameters that are trained, by name."""
        return {name: value for name, value in self._trainable.model.named_parameters() if value.requires_grad}

    def _train(self, texts: Sequence[Activations], held_out: Sequence[Activations], vocab: Any) -> bool:
        """Go on to the end, or until it gets no better; returns whether it came so far before time was over."""
        settings, state = self._settings, self._state
        per_epoch = -(-len(texts) // settings.batch)
        last = per_epoch * settings.epochs
        while state.step < last and not self._is_enough():
            if time.monotonic() > self._deadline:
                self._evaluate(held_out)
                return False
            epoch, index = divmod(state.step, per_epoch)
            note = f"α {state.history[-1]:.3f}" if state.history else ""
            self._progress(f"training, epoch {epoch + 1}", state.step, last, note)
            batch = self._order(len(texts), epoch)[index * settings.batch :][: settings.batch]
            self._step([texts[number] for number in batch], vocab, settings.rate * (1 - state.step / last))
            state.step += 1
            if state.step % per_epoch == 0:
                self._evaluate(held_out)
            if state.step % _SAVE_EVERY == 0 or state.step % per_epoch == 0:
                self._save()
        return True

    def _is_enough(self) -> bool:
        """Whether two epochs in a row brought nothing."""
        history = self._state.history
        return len(history) > 2 and max(history[-2:]) <= max(history[:-2])

    def _order(self, number: int, epoch: int) -> list[int]:
        generator = self._torch.Generator().manual_seed(self._settings.seed * 1000 + epoch)
        return list(self._torch.randperm(number, generator=generator).tolist())

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
            loss = torch.nn.functional.cross_entropy(
                logits, torch.searchsorted(vocab, each.labels), label_smoothing=self._settings.smoothing,
                reduction="sum",
            )  # fmt: skip
            (loss / num_labels).backward()
        torch.nn.utils.clip_grad_norm_(list(self._lora().values()), _MAX_NORM)
        optimizer.step()

    def _evaluate(self, held_out: Sequence[Activations]) -> None:
        found = alpha(self._counts(held_out, "measuring"))
        self._state.history.append(found)
        if found > self._state.best_alpha:
            self._state.best_alpha = found
            self._state.best = {name: value.detach().clone() for name, value in self._lora().items()}

    def _put(self, values: dict[str, Any]) -> None:
        with self._torch.no_grad():
            for name, value in self._lora().items():
                if name in values:
                    value.copy_(values[name])

    def _save(self) -> None:
        state = self._state
        values = {
            "key": self._key, "step": state.step, "history": state.history, "best": state.best,
            "best_alpha": state.best_alpha, "optimizer": self._optimizer.state_dict(),
            "lora": {name: value.detach() for name, value in self._lora().items()},
        }  # fmt: skip
        data = io.BytesIO()
        self._torch.save(values, data)
        write_whole(self._path, data.getvalue())

    def _resume(self) -> None:
        """Go on from the state file, where there is one of the same training."""
        if not self._path.is_file():
            return
        device = self._trainable.head.weight.device
        try:
            values = self._torch.load(self._path, map_location=device, weights_only=True)
            if values["key"] != self._key:
                raise ValueError("another training")
            self._put(values["lora"])
            self._optimizer.load_state_dict(values["optimizer"])
            self._state = _State(values["step"], values["history"], values["best"], values["best_alpha"])
        except Exception:  # torch.load says of damaged files whatever its parts say
            self._progress("what was begun before is of other lessons or settings: beginning anew", 0, 0, "")

    def _adapter(self, held_out: Gain, guard: Gain | None) -> Adapter:
        pairs: dict[str, dict[str, Any]] = {}
        for name, value in self._lora().items():
            matrix, _, side = name.partition(".lora_")
            pairs.setdefault(matrix, {})[side[0]] = value.detach().float().cpu().numpy().copy()
        guarded = (guard.before, guard.after) if guard else (0.0, 0.0)
        card = self._card.model_copy(
            update={
                "num_trained": len(self._data.trained),
                "trained_on": tuple(sorted({prompt_digest(lesson) for lesson in self._data.trained})),
                "held_out": (round(held_out.before, 5), round(held_out.after, 5)),
                "guard": (round(guarded[0], 5), round(guarded[1], 5)),
            }
        )
        return Adapter(card, {name: (sides["A"], sides["B"]) for name, sides in pairs.items()})


def trainable_file(engine: Engine) -> Path:
    """Where the weights of a model lie, to be trained. Raises OptionError, or MissingDependency."""
    path = file_of(engine)
    check_trainable(path)
    return path


def train_file(
    path: Path, run_on: tuple[str, int], data: TrainingData, settings: TrainSettings, card: AdapterCard,
    vocab_size: int, state: Path, progress: OnProgress,
) -> Trained:  # fmt: skip
    """Load the model at `path` on a device, with a number of threads (0: all), and train it."""
    progress("loading", 0, 0, "")
    return Training(load_trainable(path, *run_on), data, settings, card, vocab_size, state, progress).run()


def _short(lessons: Sequence[Lesson]) -> list[Lesson]:
    """Those that are not too long, and have anything to say."""
    return [each for each in lessons if each.known and len(each.prompt_ids) + len(each.token_ids) <= MAX_LEN]
