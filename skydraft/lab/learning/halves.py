"""Split the draft model into lower layers, which run once for each text, and upper layers, which are trained."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from skydraft.engines.checkpoints.trainable import TrainableModel
from skydraft.lab.learning.lessons import WRONG, Lesson


@dataclass(frozen=True, slots=True)
class Activations:
    """The upper layers' input for one lesson: `hidden` [1, len, hidden_size], and a layer's other arguments.

    The rows at the places `at` should give the tokens `labels`. The text has `num_wrong` more wrong tokens, whose right
    tokens are unknown.
    """

    hidden: Any
    arguments: dict[str, Any]
    at: Any
    labels: Any
    num_wrong: int


class _Stop(Exception):
    """Raised when the lower half is done."""


class Halves:
    """The lower layers and the last `num_upper` ones. Rows are float32, on the model's device. `vocab_size` is the
    tokenizer's size; rows of the head beyond it are padding."""

    def __init__(self, trainable: TrainableModel, num_upper: int, vocab_size: int) -> None:
        import torch

        self._torch, self._trainable, self._vocab_size = torch, trainable, vocab_size
        self.first = max(len(trainable.decoder.layers) - num_upper, 0)

    def activations(self, lesson: Lesson) -> Activations:
        torch, caught = self._torch, dict[str, Any]()
        weight = self._trainable.head.weight

        def catch(layer: Any, args: Any, kwargs: Any) -> None:
            hidden = args[0] if args else kwargs.pop("hidden_states")
            # Drop the cache: its name depends on the version of transformers.
            rest = {name: kwargs[name] for name in kwargs.keys() - {"cache", "past_key_values"}}
            caught.update(hidden=hidden, arguments={**rest, "use_cache": False})
            raise _Stop

        handle = self._trainable.decoder.layers[self.first].register_forward_pre_hook(catch, with_kwargs=True)
        with handle, suppress(_Stop), torch.no_grad():
            ids = torch.tensor([[*lesson.prompt_ids, *lesson.token_ids[:-1]]], device=weight.device)
            self._trainable.decoder(input_ids=ids, use_cache=False)
        known, base = lesson.known, len(lesson.prompt_ids) - 1
        at = torch.tensor([base + index for index in known], device=weight.device)
        labels = torch.tensor([lesson.token_ids[index] for index in known], device=weight.device)
        return Activations(caught["hidden"], caught["arguments"], at, labels, lesson.marks.count(WRONG))

    def rows(self, activations: Activations) -> Any:
        """Run the upper half, and return its rows at the labels' places, [num_labels, hidden_size]."""
        hidden = activations.hidden
        for layer in self._trainable.decoder.layers[self.first :]:
            hidden = layer(hidden, **activations.arguments)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return self._trainable.decoder.norm(hidden[0, activations.at])

    def choices(self, activations: Activations, best: int = 1) -> Any:
        """Return the likeliest tokens at the labels' places, [num_labels, best], from the whole vocabulary."""
        with self._torch.no_grad():
            return self._trainable.head(self.rows(activations))[:, : self._vocab_size].topk(best).indices

    def num_right(self, activations: Activations) -> tuple[int, int]:
        """Return (tokens of a lesson on which the model and the target agree, tokens judged)."""
        labels = activations.labels
        right = int((self.choices(activations)[:, 0] == labels).sum()) if len(labels) else 0
        return right, len(labels) + activations.num_wrong
