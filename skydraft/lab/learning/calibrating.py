"""Calibrate the gate to a pair of models, with texts that both write here or with lessons."""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal, TypeAlias

from skydraft import api
from skydraft.config import DecodingParams
from skydraft.decoding.plan import make_plan
from skydraft.decoding.reading import TextReader
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.adapter import digest
from skydraft.engines.base import Engine
from skydraft.errors import OptionError, RecordsError, telling
from skydraft.files import write_whole
from skydraft.gating.calibration import Calibration, PairSide
from skydraft.gating.fitting import LabelledText, fit
from skydraft.gating.gates import measure
from skydraft.lab.learning.lessons import KNOWN, WRONG, Lesson
from skydraft.lab.learning.training import Gain, gain
from skydraft.prompts.messages import Message
from skydraft.prompts.pair import read_prompt
from skydraft.types import Prompt, Signals, short_weights

_MODE_OF: dict[Literal["target", "draft"], str] = {"target": "cloud", "draft": "edge"}
_NEWEST = 60  # answers for comparing an adapter with the one in use
OnDone: TypeAlias = Callable[[], None]


def _read(
    engine: Engine, prompt: Prompt, token_ids: Sequence[int], params: DecodingParams
) -> list[tuple[int, Signals]]:
    with closing(TextReader(engine, prompt, params, lambda row, _: measure(row))) as reader:
        return reader.read(token_ids)


def labelled(edge: Engine, lesson: Lesson) -> LabelledText:
    """Read a lesson with a draft model, perhaps another than drafted it, and label the tokens that the target judged.
    The model chooses with the lesson's parameters. At a token marked WRONG its choice counts as wrong."""
    choices = _read(edge, Prompt(lesson.prompt_ids), lesson.token_ids, lesson.decoding)
    judged = [index for index, mark in enumerate(lesson.marks) if mark in KNOWN or mark == WRONG]
    disagrees = (lesson.marks[index] == WRONG or choices[index][0] != lesson.token_ids[index] for index in judged)
    return LabelledText("target", tuple(choices[index][1] for index in judged), tuple(disagrees))


def label_texts(
    edge: Engine, cloud: Engine, questions: Iterable[tuple[Message, ...]], max_new_tokens: int, on_done: OnDone
) -> list[LabelledText]:
    """Let each model answer by itself, greedily, and label both texts. Call `on_done` after each question."""
    params = DecodingParams(max_new_tokens=max_new_tokens)
    texts: list[LabelledText] = []
    for messages in questions:
        prompts = read_prompt(edge, messages)
        for path, mode in _MODE_OF.items():
            request = GenerateRequest(messages, make_plan(mode), params, adapter="none")  # `edge` already has one
            token_ids = api.start(request, edge=edge, cloud=cloud).run().token_ids
            drafted = _read(edge, prompts.edge, token_ids, params)
            read = _read(cloud, prompts.target, token_ids, params) if path == "draft" else ()
            wanted = [choice for choice, _ in read] or token_ids
            disagrees = tuple(mine != theirs for (mine, _), theirs in zip(drafted, wanted, strict=True))
            texts.append(LabelledText(path, tuple(signals for _, signals in drafted), disagrees))
        on_done()
    return texts


def side_of(engine: Engine) -> PairSide:
    return PairSide(name=engine.name, fingerprint=engine.fingerprint)


def read_lessons(edge: Engine, lessons: Sequence[Lesson], on_done: OnDone) -> list[LabelledText]:
    texts = []
    for lesson in lessons:
        texts.append(labelled(edge, lesson))
        on_done()
    return texts


def calibrate_lessons(
    lessons: Sequence[Lesson], texts: Sequence[LabelledText], edge: Engine, name: str,
    learned_from: frozenset[str] = frozenset(),
) -> tuple[Calibration, list[LabelledText]]:  # fmt: skip
    """Fit a calibration called `name` to lessons of one target, which the draft model has read as `texts`.

    `learned_from` has digests of the prompts that it was trained on. Return the calibration, and the texts of all other
    prompts: only these set its limits. Raises RecordsError or PromptError for too few of them.
    """
    read = zip(lessons, texts, strict=True)
    unseen = [text for lesson, text in read if digest(lesson.prompt_ids) not in learned_from]
    if not unseen:
        message = "The adapter was trained on all these answers, so none of them can show how well it does on others."
        raise RecordsError(message, hint="Collect more with --learn DIR.")
    target = PairSide(name=short_weights(lessons[0].target), fingerprint=lessons[0].target)
    longest = max(len(lesson.token_ids) for lesson in lessons)
    return fit(texts, side_of(edge), target, name, longest, unseen=unseen), unseen


def write_calibration(made: Calibration, cache: Path, out: Path | None = None) -> Path:
    """Write a calibration to `out`, or into `cache`, where it replaces an earlier one of the same pair. Return its
    file. Raises OptionError."""
    pair = hashlib.sha256(f"{made.draft.fingerprint} {made.target.fingerprint}".encode()).hexdigest()[:8]
    folder, names = cache / "calibrations", re.sub(r"[^\w.-]", "_", f"{made.draft.name}--{made.target.name}")[:100]
    out = out or next(folder.glob(f"*-{pair}.json"), folder / f"{names}-{pair}.json")
    with telling(OptionError, f"{out} cannot be written", "Choose another file with --out."):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, f"{made.model_dump_json(by_alias=True, indent=1)}\n".encode())
    return out


def gain_over(
    used: Engine, lessons: Sequence[Lesson], texts: Sequence[LabelledText], seen: frozenset[str]
) -> Gain | None:
    """Return the change of α on the newest lessons, from the draft model `used` to the one that read `texts`.

    Lessons with prompts in `seen`, digests of the training prompts of `used`, do not count. None if no others remain.
    """
    newest = [each for each in zip(lessons, texts, strict=True) if digest(each[0].prompt_ids) not in seen][-_NEWEST:]
    if not newest:
        return None
    after = [(text.disagrees.count(False), len(text.disagrees)) for _, text in newest]
    olds = [labelled(used, lesson).disagrees for lesson, _ in newest]
    return gain([(each.count(False), len(each)) for each in olds], after, [lesson.prompt_ids for lesson, _ in newest])
