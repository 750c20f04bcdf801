"""Messages as the model was trained to see them: the chat template that comes with the model.

Templates are written for transformers 5, so this renders like it (`transformers.utils.chat_template_utils`). A template
is untrusted code, so it runs in jinja2's sandbox and sees only strings. Its loops, calls, operators, filters and output
are counted, so that it ends in any thread, without a signal or a clock. Python's work within one step on nested values
is not counted.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache, wraps
from math import prod
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias

from jinja2 import Template, TemplateError, meta, nodes, pass_context
from jinja2.exceptions import SecurityError, UndefinedError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from skydraft.engines.vocab import Vocab, kept_with_vocab
from skydraft.errors import BrokenModel, PromptError
from skydraft.prompts.messages import Message, in_form

Settings: TypeAlias = Mapping[str, Any]  # further values for a template
NO_SETTINGS: Settings = MappingProxyType({})
_now = datetime.now  # tests replace it to stop the clock
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}
_CUT = "<|the answer goes on here|>"
_WORDS = "20305070110"  # digits, which no template changes
_PARAMETERS = {"type": "object", "properties": {}}
ANY_TOOL = {"type": "function", "function": {"name": "f", "description": "f", "parameters": _PARAMETERS}}
# Qwen2.5-Coder 1.5B has two braces where 0.5B and 7B have one; the models of a pair would read different examples.
_SLIP = '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}'
_MAX_STEPS = 1_000_000  # about a second; a long conversation with many tools takes some ten thousand
_MAX_SIZE = 2**24  # characters, or items of a list
_CHARS_A_STEP, _ITEMS_A_STEP, _FILTERED_A_STEP, _STEPS_A_CALL = 256, 64, 4, 4
_CHEAP = ("length", "count", "first", "last", "default", "d")  # filters that do not look at each item
_BUDGET = "_budget of this rendering"
# Forms of a call's arguments to try if a template fails: as given, as objects, as text (which DeepSeek's join).
_FORMS: tuple[Callable[[Any], Any], ...] = (
    lambda given: given,
    lambda given: {"": given} if isinstance(given, str) else given,
    lambda given: given if isinstance(given, str) else json.dumps(given, ensure_ascii=False),
)
_GROWING = frozenset((  # methods of texts, and filters
    "replace", "join", "center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "indent", "wordwrap",
    "batch", "slice", "tojson", "sum",
))  # fmt: skip


def render(
    vocab: Vocab, messages: Sequence[Message], tools: Sequence[Any] = (), settings: Settings = NO_SETTINGS
) -> str:
    """Render the prompt for the next answer; if the last message is open, it ends with that message's text.

    Without a template, render a single question. `tools` are descriptions in OpenAI's form. The template places the BOS
    text. Raises PromptError for a conversation that the model does not take, BrokenModel for a template that does not
    compile or fails.
    """
    if not messages:
        raise PromptError("The conversation is empty.", hint="Give at least one user message.")
    roles, faults = [message.role for message in messages], list[Exception]()
    template = (vocab.tool_template if tools else None) or vocab.chat_template
    if template is None:
        if roles != ["user"]:
            message = "This model has no chat template, so it takes one user message and nothing else."
            raise PromptError(message, hint="Give one prompt alone, or use --raw.")
        return vocab.bos_text + messages[0].content
    has_calls = any(key == "tool_calls" for message in messages for key, _ in message.more)
    for form in _FORMS if has_calls else _FORMS[:1]:
        try:
            told, in_parts = [in_form(each, form) for each in messages], _takes_parts(vocab, template)
            return _rendered(vocab, template, told, tools, settings, in_parts=in_parts)
        except _Refusal as error:
            hint = "Try it without the system message." if "system" in roles else ""
            raise PromptError(f"The chat template refuses this conversation: {_one_line(error)}", hint=hint) from error
        except Exception as error:  # operators and string methods in a template can raise any error
            faults.append(error)
    hint = "Use --raw to send the prompt without it."
    raise BrokenModel(f"The chat template of this model fails: {_one_line(faults[0])}", hint=hint) from faults[0]


@kept_with_vocab
def _takes_parts(vocab: Vocab, template: str) -> bool:
    """Whether a template reads a user's words only as a list of parts. Raises TemplateError if it drops them."""
    tools, is_lost = [ANY_TOOL] if template == vocab.tool_template else [], False
    for in_parts in (False, True):
        with suppress(_Refusal, UndefinedError, TypeError, ValueError, AttributeError):  # it takes only parts
            is_lost = _WORDS not in _rendered(vocab, template, [Message("user", _WORDS)], tools, in_parts=in_parts)
            if not is_lost:
                return in_parts
    if is_lost:
        raise TemplateError("it leaves out the user's words")
    return False


def _rendered(
    vocab: Vocab, template: str, messages: Sequence[Message], tools: Sequence[Any], settings: Settings = NO_SETTINGS, *,
    in_parts: bool,
) -> str:  # fmt: skip
    conversation = [{"role": message.role, "content": message.content, **dict(message.more)} for message in messages]
    is_open = messages[-1].is_open
    if is_open:
        conversation[-1]["content"] += _CUT  # the template adds an end of turn after it, to be cut off
    for message in conversation if in_parts else ():
        message["content"] = [{"type": "text", "text": message["content"]}]
    # Templates test `tools is none`, which is false for an undefined name.
    text = render_within(
        _compiled(template), messages=conversation, tools=list(tools) or None, documents=None,
        add_generation_prompt=not is_open, bos_token=vocab.bos_text, eos_token=vocab.eos_text, **settings,
    )  # fmt: skip
    return text[: text.rindex(_CUT)] if is_open else text


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())[:300] or type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."


def names_in(template: str) -> frozenset[str]:
    """Return the names that a template reads, beside the usual ones. Empty if it does not compile."""
    with suppress(TemplateError):
        environment = BoundedEnvironment()
        found = meta.find_undeclared_variables(environment.parse(template))
        return frozenset(found) - environment.globals.keys() - _GIVEN
    return frozenset()


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    return BoundedEnvironment().from_string(template.replace(f"{{{_SLIP}}}", _SLIP))


class _Refusal(TemplateError):
    """Raised by a template's `raise_exception`."""


def _refuse(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _json(x: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False) -> str:
    # jinja2's own filter sorts the keys and escapes HTML markup.
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the model's own text for training; its body has its own scope."""

    tags = {"generation"}  # noqa: RUF012  declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _dict(*args: Any, **items: Any) -> dict[Any, Any]:
    """`dict` as a function: the type's methods could change read-only values."""
    return dict(*args, **items)


class _PublicNamespace(Namespace):
    """jinja2's namespace without underscore names, which could give a template access to Python's internals."""

    def __init__(self, /, *args: Any, **attributes: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **attributes).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace takes no name such as {name!r}")
        super().__setitem__(name, value)


class _Budget:
    def __init__(self) -> None:
        self._left = _MAX_STEPS

    def weigh(self, value: Any, steps: int = 1, items: int = _ITEMS_A_STEP) -> Any:
        """Count `steps`, and one more for each `items` items or `_CHARS_A_STEP` characters; returns the value. Raises
        SecurityError."""
        size = len(value) if isinstance(value, str | list | tuple | dict | range) else 0
        self._left -= steps + size // (_CHARS_A_STEP if isinstance(value, str) else items)
        if self._left < 0 or size > _MAX_SIZE:
            raise SecurityError("it does too much work")
        return value


def _check(name: str, value: Any, *others: Any) -> None:
    """Raise SecurityError if a method or operator may make a value that is too large."""
    factors = [value, *others]
    if name == "replace" and len(others) > 1:
        factors = [str(value).count(str(others[0])), str(others[1])]
    elif name in ("format", "format_map", "%"):
        factors.append(max(map(int, re.findall(r"\d{1,9}", str(value))), default=1))
    if prod(max(_size(factor), 1) for factor in factors) > _MAX_SIZE:
        raise SecurityError("it makes a value that is too large")


def _size(value: Any, depth: int = 3) -> int:
    """Return how much a value can add to a text or list: a number itself, or the length with nested values."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple) and depth:
        return len(value) + sum(_size(item, depth - 1) for item in value)
    return abs(value) if isinstance(value, int) else len(value) if isinstance(value, str) else 1


def _checked(name: str, function: Any) -> Any:
    """Return a filter that first checks its arguments, since it can make large values."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def check(*given: Any, **options: Any) -> Any:
        given = tuple(list(each) if isinstance(each, Iterator) else each for each in given)
        _check(name, *given[first:], *options.values())
        return function(*given, **options)

    return check


def _weigh(context: Context, value: Any, *steps: int, **items: int) -> Any:
    return context.parent[_BUDGET].weigh(value, *steps, **items)  # templates cannot write to `parent`


def _stepped(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    return (_weigh(context, None) or item for item in items)


class _Counting(NodeTransformer):
    """Puts counters into a template, around values that it loops over, compares, joins, slices, filters or writes."""

    def generic_visit(self, node: nodes.Node, *args: Any, **options: Any) -> nodes.Node:
        super().generic_visit(node, *args, **options)
        if isinstance(node, nodes.For):
            node.iter = _counted("_stepped", node.iter)
        elif isinstance(node, nodes.Operand):
            node.expr = _counted("_weighed", node.expr)
        elif isinstance(node, nodes.Filter) and node.node is not None:  # None in a filter block
            node.node = _counted("_weighed" if node.name in _CHEAP else "_filtered", node.node)
        elif isinstance(node, nodes.Getitem):
            node.node = _counted("_weighed", node.node) if isinstance(node.arg, nodes.Slice) else node.node
        elif isinstance(node, nodes.Output):
            plain = nodes.TemplateData
            node.nodes = [each if isinstance(each, plain) else _counted("_weighed", each) for each in node.nodes]
        return _counted("_weighed", node) if isinstance(node, nodes.Concat) else node


def _counted(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox as transformers sets it up. Only `render_within` renders its templates."""

    intercepted_binops = frozenset(("*", "+", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
        del self.globals["lipsum"]  # it can write any amount of text
        self.globals |= {"raise_exception": _refuse, "dict": _dict, "namespace": _PublicNamespace}
        self.globals["strftime_now"] = lambda format: _now().strftime(format)
        self.filters["tojson"] = _json
        self.filters |= {name: _checked(name, self.filters[name]) for name in _GROWING & self.filters.keys()}
        self.filters |= {
            # No further arguments: a template could raise its budget with negative steps.
            "_weighed": pass_context(lambda context, value: _weigh(context, value)),
            "_filtered": pass_context(lambda context, value: _weigh(context, value, items=_FILTERED_A_STEP)),
            "_stepped": pass_context(_stepped),
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            _check(operator, left, right, _CHARS_A_STEP)
        elif operator == "*" or (operator == "%" and isinstance(left, str)):
            _check(operator, left, right)
        return _weigh(context, super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **options: Any) -> Any:
        text = getattr(obj, "__self__", None)
        if isinstance(text, str) and obj.__name__ in _GROWING:
            args = tuple(list(each) if isinstance(each, Iterator) else each for each in args)
            _check(obj.__name__, text, *args, *options.values())
        return _weigh(context, super().call(context, obj, *args, **options), _STEPS_A_CALL)


def render_within(template: Template, **given: Any) -> str:
    """Render a template of a `BoundedEnvironment`. Raises SecurityError if that takes too much work or memory."""
    budget, size, parts = _Budget(), 0, list[str]()
    for part in template.generate(**given, **{_BUDGET: budget}):
        parts.append(part)
        size += len(budget.weigh(part))
        if size > _MAX_SIZE:
            raise SecurityError("its text is too long")
    return "".join(parts)
