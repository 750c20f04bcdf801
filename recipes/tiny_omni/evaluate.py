"""How often a model's greedy caption states the right class, and how unsure it is where the class is decided."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import numpy as np

from recipes.tiny_omni.attributes import CLASSES, Attributes
from recipes.tiny_omni.batches import (
    NO_DECISION,
    Example,
    audio_inputs,
    build_extractor,
    caption_ids,
    mel_of,
    prompt_ids,
)
from recipes.tiny_omni.captions import DEFAULT_PROMPT, find_statements, read_attributes

_MAX_NEW_TOKENS = 80
_MIN_VALUES = 10  # for deciles


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy caption, the entropy of each of its tokens in nats, and which of them decide a class."""

    text: str
    entropies: tuple[float, ...]
    decides: tuple[bool, ...]
    truth: Attributes

    def right(self) -> dict[str, bool]:
        """Per attribute, whether the caption states its true class; what it does not state is wrong."""
        said = read_attributes(self.text)
        return {name: said[name] == value for name, value in self.truth.as_dict().items()}


def load_held_out(folder: Path) -> list[Example]:
    """Examples of a folder with `truth.jsonl`, in its order."""
    import soundfile

    extractor = build_extractor()
    examples = []
    for line in (folder / "truth.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        samples, _ = soundfile.read(folder / record["audio"], dtype="float32")
        attributes = Attributes(**{name: record[name] for name in CLASSES})
        examples.append(Example(mel_of(extractor, np.asarray(samples)), attributes))
    return examples


def answer(model: Any, tokenizer: Any, example: Example) -> Answer:
    """The greedy caption of one clip for the default prompt."""
    import torch

    asked = torch.tensor([prompt_ids(tokenizer, DEFAULT_PROMPT, example.mel.shape[1])])
    with torch.inference_mode():
        output = model.generate(
            input_ids=asked,
            attention_mask=torch.ones_like(asked),
            **audio_inputs([example.mel]),
            max_new_tokens=_MAX_NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    text = tokenizer.decode(output.sequences[0, asked.shape[1] :], skip_special_tokens=True)
    # [num_tokens, vocab]
    log_probs = torch.cat(output.logits).float().log_softmax(-1)
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    _, decided = caption_ids(tokenizer, text)
    decides = tuple(decision != NO_DECISION for decision in decided)
    return Answer(text, tuple(entropies.tolist()), decides, example.attributes)


def evaluate(model: Any, tokenizer: Any, examples: list[Example], show: Callable[[Answer], None]) -> dict[str, Any]:
    """Accuracy per attribute and over all, tokens per caption, and entropies in nats at deciding and other tokens."""
    answers = []
    for example in examples:
        answers.append(answer(model, tokenizer, example))
        show(answers[-1])
    accuracy = {name: fmean(given.right()[name] for given in answers) for name in CLASSES}
    tokens = [len(given.entropies) for given in answers]
    return {
        "num_clips": len(answers),
        "accuracy": {name: round(value, 3) for name, value in accuracy.items()},
        "accuracy_all": round(fmean(accuracy.values()), 3),
        "caption_tokens": {"min": min(tokens), "mean": round(fmean(tokens), 1), "max": max(tokens)},
        "entropy_deciding_right": _spread(_entropies(answers, right=True)),
        "entropy_deciding_wrong": _spread(_entropies(answers, right=False)),
        "entropy_other": _spread([value for given in answers for value in _others(given)]),
    }


def _entropies(answers: list[Answer], *, right: bool) -> list[float]:
    """Entropies at the tokens that decided rightly, or wrongly, in the order of the captions."""
    found = []
    for given in answers:
        at = [value for value, decides in zip(given.entropies, given.decides, strict=False) if decides]
        for value, is_right in zip(at, _in_text_order(given), strict=True):
            if is_right == right:
                found.append(value)
    return found


def _in_text_order(given: Answer) -> list[bool]:
    statements = sorted(find_statements(given.text).items(), key=lambda item: item[1].start)
    return [statement.value == getattr(given.truth, name) for name, statement in statements]


def _others(given: Answer) -> list[float]:
    return [value for value, decides in zip(given.entropies, given.decides, strict=False) if not decides]


def _spread(values: list[float]) -> dict[str, float | None]:
    """Count and deciles 1, 5 and 9; None where there are too few values."""
    if len(values) < _MIN_VALUES:
        return {"count": len(values), "p10": None, "p50": None, "p90": None}
    tenths = quantiles(values, n=10)
    return {"count": len(values)} | {f"p{10 * n}": round(tenths[n - 1], 2) for n in (1, 5, 9)}
