"""Choose lessons of one vocabulary and one target, and hold some out."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import numpy as np

from skydraft.decoding.target import target_of
from skydraft.edge.cloud import Cloud
from skydraft.engines.adapter import AdapterCard, digest
from skydraft.engines.base import Engine
from skydraft.engines.checkpoints.trainable import check_trainable
from skydraft.engines.vocab import Vocab, num_shared
from skydraft.errors import OptionError, RecordsError
from skydraft.lab.learning.lessons import Lesson, Store, encode
from skydraft.prompts.pair import beginning_ids

MIN_GENERATIONS = 24  # with fewer, the held-out answers prove nothing
MAX_LEN = 1024  # limit of a prompt and its answer together, in tokens
MAX_GENERATIONS = 1000  # the newest; their activations need 4 kB of memory a token
_HELD_OUT = 1 / 6
_MIN_HELD_OUT = 6
_MIN_BEGINNING = 4  # tokens beyond the template's that a common beginning needs

# Called with (step, units done, total, note such as "α 0.71").
OnProgress: TypeAlias = Callable[[str, int, int, str], None]


def choose(
    store: Store, vocab: Vocab, target: str | None = None, before: Store | None = None, max_len: int | None = None
) -> tuple[list[Lesson], str]:
    """Choose the newest lessons of one vocabulary and one target, up to `max_len` tokens, with tokens of the target.
    Return them, the oldest first, and a text about what was left out.

    The lessons of `before` are older than those of `store`. Equal lessons count once. Without `target`, take the one
    with the most lessons. Raises RecordsError for too few lessons.
    """
    stores = [each for each in (before, store) if each]
    if target is None:
        targets = Counter(lesson.target for lesson in _of_vocab(stores, vocab, Counter()) if lesson.known)
        target = targets.most_common(1)[0][0] if targets else ""
    skipped, newest, seen = Counter[str](), deque[Lesson](maxlen=MAX_GENERATIONS), set[str]()
    for lesson in _of_vocab(stores, vocab, skipped):
        key = answer_digest(lesson)
        if lesson.target != target:
            skipped["of another target"] += 1
        elif max_len and len(lesson.prompt_ids) + len(lesson.token_ids) > max_len:
            skipped[f"of more than {max_len} tokens with their prompts"] += 1
        elif not lesson.known or key in seen:
            skipped["that say nothing new"] += 1
        else:
            seen.add(key)
            newest.append(lesson)
    left_out = ", ".join(f"{number} {what}" for what, number in sorted(skipped.items()))
    if len(newest) < MIN_GENERATIONS:
        says = f"{store.folder} has {len(newest)} usable answers, and {MIN_GENERATIONS} are needed."
        raise RecordsError(f"{says} Left out: {left_out or 'none'}.", hint="Collect more, or add prompts.")
    return list(newest), left_out


def _of_vocab(stores: Sequence[Store], vocab: Vocab, skipped: Counter[str]) -> Iterator[Lesson]:
    for lesson in chain.from_iterable(store.lessons(skipped) for store in stores):
        if lesson.vocab == vocab.fingerprint and max(*lesson.prompt_ids, *lesson.token_ids) < vocab.size:
            yield lesson
        else:
            skipped["of another vocabulary"] += 1


def split(lessons: Sequence[Lesson]) -> tuple[list[Lesson], list[Lesson]]:
    """Split lessons into (training, held out). About a sixth is held out. All answers to a prompt stay together, and
    all of a conversation.

    The training part and its order do not depend on the order of `lessons`, because parallel answers arrive in any
    order. The held-out part keeps that order. Raises RecordsError for too few prompts.
    """
    groups: dict[bytes, list[Lesson]] = {}
    key_of = _conversations(lessons)
    for lesson in lessons:
        groups.setdefault(key_of[lesson.prompt_ids], []).append(lesson)
    order = sorted(groups, key=lambda key: hashlib.sha256(key + bytes(8)).digest())
    total = sum(map(len, groups.values()))
    held, num_held = set[bytes](), 0
    wanted = max(_MIN_HELD_OUT, total * _HELD_OUT)
    for key in reversed(order):
        if num_held < wanted and num_held + len(groups[key]) <= total / 2:
            held.add(key)
            num_held += len(groups[key])
    if num_held < wanted:
        message = f"The {total} answers belong to {len(order)} prompts, too few to hold some out."
        raise RecordsError(message, hint="Collect answers to more prompts.")
    trained = [lesson for key in order if key not in held for lesson in sorted(groups[key], key=encode)]
    return trained, [lesson for lesson in lessons if key_of[lesson.prompt_ids] in held]


def _conversations(lessons: Sequence[Lesson]) -> dict[tuple[int, ...], bytes]:
    """Return a digest for each prompt: its own, or, if it begins with other whole prompts, the shortest one's."""
    found, first = dict[tuple[int, ...], bytes](), tuple[int, ...]()
    for prompt in sorted({lesson.prompt_ids for lesson in lessons}):  # sorted: extensions follow their prompt
        if not first or prompt[: len(first)] != first:
            first = prompt
        found[prompt] = hashlib.sha256(np.array(first, "<i8").tobytes()).digest()
    return found


def answer_digest(lesson: Lesson) -> str:
    """Return a digest of a lesson's prompt and answer."""
    return digest((*lesson.prompt_ids, -1, *lesson.token_ids))


def weights_of(cloud: Engine | Cloud) -> str:
    """Return the identity of the target's weights. Raises OptionError if the server does not report it."""
    facts = target_of(cloud).facts(None)
    assert facts is not None  # `facts(None)` waits for an answer
    if not facts.weights:
        message = "The server does not tell which model it runs, so its answers cannot be learned from."
        raise OptionError(message, hint="Name its model there.")
    return facts.weights


def beginning_of(lessons: Sequence[Lesson], template: Sequence[int]) -> tuple[int, ...]:
    """Return the common first tokens of all prompts; empty if they hardly go beyond the `template`. The last token of a
    prompt never counts, even if there is only one prompt."""
    shared = np.array(lessons[0].prompt_ids[:-1])
    for lesson in lessons:
        shared = shared[: num_shared(shared, np.array(lesson.prompt_ids[:-1]))]
    is_own = len(shared) >= num_shared(shared, np.array(template)) + _MIN_BEGINNING
    return tuple(map(int, shared)) if is_own else ()


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """The data of a training, so that both models can be closed before it starts.

    `path` is the draft model's file, `card` the adapter's card, `vocab_size` the tokenizer's size. `left_out` is a text
    about the omitted lessons.
    """

    path: Path
    card: AdapterCard
    vocab_size: int
    trained: Sequence[Lesson]
    held_out: Sequence[Lesson]
    left_out: str = ""

    def digest(self) -> str:
        lines = (line for part in (self.trained, self.held_out) for line in (*map(encode, part), b"|"))
        return hashlib.sha256(b"".join(lines)).hexdigest()


def trainable_file(engine: Engine) -> Path:
    """Return the file of a model, if it can be trained. Raises OptionError or MissingDependency."""
    if engine.takes_audio:
        hint = "Name a text model with --edge-model."
        raise OptionError(f"{engine.name} takes speech, but only text models can be trained.", hint=hint)
    path = getattr(engine, "path", None)
    if not isinstance(path, Path):
        hint = "Name a .gguf file or a checkpoint."
        raise OptionError(f"{engine.name} has no weights that can be trained.", hint=hint)
    check_trainable()
    return path


def prepare(store: Store, edge: Engine, weights: str, *, before: Store | None = None) -> TrainingTask:
    """Choose and split the lessons for a draft model and the target `weights`. The lessons of `before` are older.

    Raises a SkydraftError.
    """
    path = trainable_file(edge)
    lessons, left_out = choose(store, edge.vocab, weights, before, MAX_LEN)
    trained, held_out = split(lessons)
    beginning = beginning_of(lessons, beginning_ids(edge.vocab))
    card = AdapterCard(
        base=edge.fingerprint, base_name=edge.name, vocab=edge.vocab.fingerprint, target=weights,
        beginning_len=len(beginning), beginning=digest(beginning) if beginning else "",
    )  # fmt: skip
    return TrainingTask(path, card, edge.vocab.size, trained, held_out, left_out)
