"""jinja2's sandbox for templates that nobody has read: a rendering may do so much work, and make values so large.

Loops, calls, operators, filters and the output are counted, so that a template that loops ends in any thread, without
a signal or a clock. What Python does within one step on nested values is not counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import wraps
from math import prod
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_MAX_STEPS = 1_000_000  # about a second; a long conversation with many tools takes some ten thousand
_MAX_SIZE = 2**24  # characters, or items of a list
_CHARS_A_STEP, _ITEMS_A_STEP, _FILTERED_A_STEP, _STEPS_A_CALL = 256, 64, 4, 4
_CHEAP = ("length", "count", "first", "last", "default", "d")  # filters that do not look at each item
_BUDGET = "_budget of this rendering"
_GROWING = frozenset((  # methods of texts, and filters
    "replace", "join", "center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "indent", "wordwrap",
    "batch", "slice", "tojson", "sum",
))  # fmt: skip


class _Budget:
    """What one rendering may still do."""

    def __init__(self) -> None:
        self._left = _MAX_STEPS

    def weigh(self, value: Any, steps: int = 1, items: int = _ITEMS_A_STEP) -> Any:
        """Count steps, and one for so many items or characters; returns the value. Raises SecurityError."""
        size = len(value) if isinstance(value, str | list | tuple | dict | range) else 0
        self._left -= steps + size // (_CHARS_A_STEP if isinstance(value, str) else items)
        if self._left < 0 or size > _MAX_SIZE:
            raise SecurityError("it does too much work")
        return value


def _check(name: str, value: Any, *others: Any) -> None:
    """Raise SecurityError if a method or operator may make too large a value of these."""
    factors = [value, *others]
    if name == "replace" and len(others) > 1:
        factors = [str(value).count(str(others[0])), str(others[1])]
    elif name in ("format", "format_map", "%"):
        factors.append(max(map(int, re.findall(r"\d{1,9}", str(value))), default=1))
    if prod(max(_size(factor), 1) for factor in factors) > _MAX_SIZE:
        raise SecurityError("it makes a value that is too large")


def _size(value: Any, depth: int = 3) -> int:
    """What a value can add to a text or a list: itself as a number, or its length with what it holds."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple) and depth:
        return len(value) + sum(_size(item, depth - 1) for item in value)
    return abs(value) if isinstance(value, int) else len(value) if isinstance(value, str) else 1


def _checked(name: str, function: Any) -> Any:
    """A filter that checks what it is given, if it can make a large value of it."""
    if name not in _GROWING:
        return function
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def check(*given: Any, **options: Any) -> Any:
        given = tuple(list(each) if isinstance(each, Iterator) else each for each in given)
        _check(name, *given[first:], *options.values())
        return function(*given, **options)

    return check


@pass_context
def _weighed(context: Context, value: Any) -> Any:
    return _budget(context).weigh(value)


@pass_context
def _filtered(context: Context, value: Any) -> Any:
    return _budget(context).weigh(value, items=_FILTERED_A_STEP)


@pass_context
def _stepped(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    budget = _budget(context)
    return (budget.weigh(None) or item for item in items)


def _budget(context: Context) -> _Budget:
    budget: _Budget = context.parent[_BUDGET]  # where no template can write
    return budget


class _Counting(NodeTransformer):
    """Puts what counts into a template: around what is looped over, compared, joined, cut, filtered or written."""

    def generic_visit(self, node: nodes.Node, *args: Any, **options: Any) -> nodes.Node:
        super().generic_visit(node, *args, **options)
        if isinstance(node, nodes.For):
            node.iter = _counted("_stepped", node.iter)
        elif isinstance(node, nodes.Operand):
            node.expr = _counted("_weighed", node.expr)
        elif isinstance(node, nodes.Filter) and node.node is not None:  # it has none where it is of a block
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
    """jinja2's sandbox, whose templates are rendered by `render_within` alone."""

    intercepted_binops = frozenset(("*", "+", "**", "%"))

    def __init__(self, filters: Mapping[str, Any], **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]  # it writes as much as it is asked for
        self.filters = {name: _checked(name, each) for name, each in {**self.filters, **filters}.items()}
        self.filters |= {"_weighed": _weighed, "_filtered": _filtered, "_stepped": _stepped}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator whose result may be large."""
        if operator == "**":
            _check(operator, left, right, _CHARS_A_STEP)
        elif operator == "*" or (operator == "%" and isinstance(left, str)):
            _check(operator, left, right)
        return _budget(context).weigh(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **options: Any) -> Any:
        """A call of a macro, a loop, a method or a function."""
        text = getattr(obj, "__self__", None)
        if isinstance(text, str) and obj.__name__ in _GROWING:
            args = tuple(list(each) if isinstance(each, Iterator) else each for each in args)
            _check(obj.__name__, text, *args, *options.values())
        return _budget(context).weigh(super().call(context, obj, *args, **options), _STEPS_A_CALL)


def render_within(template: Template, **given: Any) -> str:
    """The text of a template of a `BoundedEnvironment`. Raises SecurityError where it would take too much."""
    budget, size, parts = _Budget(), 0, list[str]()
    for part in template.generate(**given, **{_BUDGET: budget}):
        parts.append(part)
        size += len(budget.weigh(part))
        if size > _MAX_SIZE:
            raise SecurityError("its text is too long")
    return "".join(parts)
