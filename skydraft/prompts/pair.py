"""The prompts of one request: tokens and speech of its messages, for the draft model and for the target.

The words of a conversation are plain text: `<|im_end|>` in a message, a tool or a result is ten characters, and ends no
turn. But a tokenizer reads the name of a special token as that token everywhere. So each such name is cut after its
first character before the chat template places it, and the text between two cuts is encoded separately.
"""

import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache, partial
from itertools import chain, islice, product, takewhile
from typing import Any, Literal, Self

from skydraft.engines.base import Engine
from skydraft.engines.vocab import Vocab, kept_with_vocab
from skydraft.errors import ContextExceeded, PromptError, SkydraftError
from skydraft.prompts.chat_template import NO_SETTINGS, Settings, render
from skydraft.prompts.messages import Message
from skydraft.prompts.thinking import REASONING, apart, has_thought, resumed, template_of
from skydraft.types import Prompt

ShareAudio = Literal["features", "none"]
_TEXTS = ("a", "1", "中", "\nb", " c", "<d")  # their first characters merge with the text before in different ways
_DAYS = (datetime(2001, 2, 3), datetime(2032, 11, 30))
_MIN_BEGINNING = 4
_CHARS_READ = 8  # for each token of the context: the first part of a long text to count


@dataclass(frozen=True, slots=True)
class PromptPair:
    """One prompt for each side. The target gets rounded features of speech."""

    edge: Prompt
    target: Prompt
    features_ms: float = field(default=0.0, compare=False)  # time to make the features of the speech

    def then(self, token_ids: tuple[int, ...]) -> Self:
        edge, target = (replace(each, token_ids=each.token_ids + token_ids) for each in (self.edge, self.target))
        return replace(self, edge=edge, target=target)


def prompt_ids(
    vocab: Vocab, messages: Seq[Message], *, raw: bool = False, tools: Seq[Any] = (), settings: Settings = NO_SETTINGS,
    audio_ids: Iterable[tuple[int, ...]] = (), most: int | None = None,
) -> tuple[int, ...]:  # fmt: skip
    """Return the prompt's tokens for an answer to `messages`: by the chat template, or with `raw` the bare text.

    Only the template's own marks, speech, and names in a bare text (for FIM, for example) become special tokens.
    `audio_ids` are the tokens of each recording, in order; without them only the words are read. `settings` are for the
    template. Raises ContextExceeded early for far more than `most` tokens.
    """
    said, ids, cut = list(messages), iter(audio_ids), ""
    if not raw:
        said, tools, settings, cut = _cut_marks(vocab, apart(vocab, messages), tools, settings)
    heard = [
        replace(message, content="".join(map(vocab.written, islice(ids, len(message.audio)))) + message.content)
        for message in said
    ]
    if raw:
        text = vocab.bos_text + heard[-1].content
    elif messages and (has_ended := has_thought(vocab, messages[-1])) is not None:
        asked, thought = render(vocab, heard[:-1], tools, settings), dict(heard[-1].more)[REASONING]
        text = resumed(vocab, asked, thought, heard[-1].content, has_ended=has_ended)
    else:
        text = render(vocab, heard, tools, settings)
    if most is not None:
        check_length(vocab, text.replace(cut, ""), most)  # without the cuts, which are no tokens
    if raw:
        return vocab.encode(text)
    first, *others = text.split(cut)
    return (*vocab.encode(first), *chain.from_iterable(map(cache(vocab.encode_within), others)))


def _cut_marks(
    vocab: Vocab, messages: Seq[Message], tools: Seq[Any], settings: Settings
) -> tuple[list[Message], list[Any], Settings, str]:
    """Put a cut into each name of a special token or tag; returns messages, tools, settings and the cut's text.

    A cut is random digits: templates and JSON leave digits unchanged, and nobody can guess them.
    """
    cut, marks = f"{secrets.randbelow(10**12):012}", _marks(vocab)

    def change(text: str) -> str:
        before = cut if text.strip() in vocab.mark_words else ""  # some templates add brackets around keys
        return before + marks.sub(rf"\g<0>{cut}", text)

    def changed(message: Message) -> Message:
        more = tuple((key, _changed(of, change)) for key, of in message.more)
        return replace(message, content=change(message.content), more=more)

    try:
        return [*map(changed, messages)], [_changed(tool, change) for tool in tools], _changed(settings, change), cut
    except RecursionError as error:
        raise PromptError("The conversation has values that are nested too deep.") from error


@kept_with_vocab
def _marks(vocab: Vocab) -> re.Pattern[str]:
    tags = template_of(vocab.chat_template).tags
    ours = [f"{re.escape(tag[0])}(?={re.escape(tag[1:])})" for tag in (tags.start, tags.end) if tag]
    return re.compile("|".join((vocab.marks.pattern, *ours)))


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_changed(key, change): _changed(each, change) for key, each in value.items()}
    return [_changed(each, change) for each in value] if isinstance(value, list | tuple) else value


def check_length(vocab: Vocab, text: str, most: int) -> None:
    """Raise ContextExceeded for a text whose beginning is too long: encoding two megabytes takes seconds, and nothing
    can interrupt it."""
    num_chars = _CHARS_READ * most
    while num_chars < len(text):
        # Twice as many, since the whole text may split into other tokens than its beginning.
        if (num_tokens := len(vocab.encode(text[:num_chars]))) > 2 * most:
            num_tokens = num_tokens * len(text) // num_chars  # agents shorten their text by this number
            message = f"The prompt has about {num_tokens} tokens, the context holds {most}."
            hint = "Shorten the prompt or raise --context."
            raise ContextExceeded(message, num_tokens=num_tokens, most=most, hint=hint)
        num_chars *= 2


def beginning_ids(vocab: Vocab) -> tuple[int, ...]:
    """Return the tokens that begin every prompt of a single question, on any day. Empty if too few to matter."""
    try:
        days = [{"strftime_now": day.strftime} for day in _DAYS]
        texts = [render(vocab, [Message("user", text)], settings=day) for text, day in product(_TEXTS, days)]
    except SkydraftError:  # the template takes no single question
        return ()
    columns = zip(*map(vocab.encode, texts), strict=False)
    shared = tuple(column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns))
    return shared if vocab.chat_template and len(shared) >= _MIN_BEGINNING else ()


def read_prompt(
    reader: Engine, messages: Seq[Message], *, raw: bool = False, tools: Seq[Any] = (), settings: Settings = NO_SETTINGS
) -> PromptPair:
    """Read messages as prompts for both sides; `reader` makes features of speech. Raises PromptError."""
    read = partial(prompt_ids, reader.vocab, messages, raw=raw, tools=tools, settings=settings)
    words = Prompt(read(most=reader.context_len))  # a text that is too long fails before its speech is read
    recordings = [audio for message in messages for audio in message.audio]
    if not recordings:
        return PromptPair(words, words)
    began = time.perf_counter()
    media = tuple(reader.media(audio.samples) for audio in recordings)
    features_ms = (time.perf_counter() - began) * 1e3
    heard = read(audio_ids=map(reader.audio_tokens, media))
    # Also rounded in one process: a verdict must not depend on where the target runs.
    rounded = Prompt(heard, tuple(each.rounded() for each in media))
    return PromptPair(Prompt(heard, media), rounded, features_ms)
