"""Messages as the model was trained to see them: the chat template that comes with the model.

Rendered as transformers 5 renders it (`transformers.utils.chat_template_utils`), because templates are written for
that. A template is untrusted code, so it runs in jinja2's sandbox and sees only strings.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.utils import Namespace

from skydraft.engines.vocab import Vocab
from skydraft.errors import BrokenModel, PromptError
from skydraft.prompts.bounded import BoundedEnvironment, render_within
from skydraft.prompts.messages import Message

_now = datetime.now  # a name of its own, so that tests can stop the clock
_CUT = "<|the answer goes on here|>"
# Qwen2.5-Coder 1.5B has two braces where 0.5B and 7B have one, so that one model of a pair would read another example.
_SLIP = '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}'


def render(vocab: Vocab, messages: Sequence[Message], tools: Sequence[Any] = (), *, day: datetime | None = None) -> str:
    """The text that asks for the next answer in the conversation; without a template, the text of a single question.

    If the last message is open, the text ends with it.

    `tools` are descriptions in OpenAI's form, for templates that use them; `day` is today by default. The template
    places the BOS text. Raises PromptError for a conversation that the model does not take, BrokenModel for a template
    that does not compile or fails.
    """
    if not messages:
        raise PromptError("The conversation is empty.", hint="Give at least one user message.")
    conversation = [{"role": message.role, "content": message.content, **dict(message.more)} for message in messages]
    roles, is_open = [message.role for message in messages], messages[-1].is_open
    if is_open:
        conversation[-1]["content"] += _CUT  # a template writes the end of a turn after it
    if vocab.chat_template is None:
        if roles != ["user"]:
            raise PromptError(
                "This model has no chat template, so it takes one user message and nothing else.",
                hint="Give one prompt alone, or use --raw.",
            )
        return vocab.bos_text + messages[0].content
    try:
        text = render_within(
            _compiled(vocab.chat_template),
            messages=conversation,
            tools=list(tools) or None,  # templates ask `tools is none`, which is false of a name that was never passed
            documents=None,
            add_generation_prompt=not is_open,
            bos_token=vocab.bos_text,
            eos_token=vocab.eos_text,
            **({"strftime_now": day.strftime} if day else {}),
        )
        return text[: text.rindex(_CUT)] if is_open else text
    except _Refusal as error:
        hint = "Try it without the system message." if "system" in roles else ""
        raise PromptError(f"The chat template refuses this conversation: {_one_line(error)}", hint=hint) from error
    except Exception as error:  # operators and string methods in a template can raise any error
        hint = "Use --raw to send the prompt without it."
        raise BrokenModel(f"The chat template of this model fails: {_one_line(error)}", hint=hint) from error


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())[:300] or type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    environment = BoundedEnvironment(
        {"tojson": _json}, trim_blocks=True, lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )  # fmt: skip
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda format: _now().strftime(format)
    environment.globals["dict"] = _DictMaker()
    environment.globals["namespace"] = _PublicNamespace
    return environment.from_string(template.replace(f"{{{_SLIP}}}", _SLIP))


class _Refusal(TemplateError):
    """The error that a template raises by `raise_exception`."""


def _refuse(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _json(x: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False) -> str:
    # jinja2's own filter sorts the keys and escapes what HTML would read as markup.
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the model's own text for training; its body has a scope of its own."""

    tags = {"generation"}  # noqa: RUF012  declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _DictMaker:
    """`dict(...)` and `dict.fromkeys(...)` without the type's other methods, which could change read-only values."""

    fromkeys = staticmethod(dict.fromkeys)

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)


class _PublicNamespace(Namespace):
    """jinja2's namespace without underscore names, by which a template could reach Python's internals."""

    def __init__(self, /, *args: Any, **attributes: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **attributes).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace takes no name such as {name!r}")
        super().__setitem__(name, value)
