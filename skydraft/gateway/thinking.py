"""What clients say about thinking, each in its own words; and what that means for a chat template."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from skydraft.engines.vocab import Vocab
from skydraft.gateway.refusals import Refusal
from skydraft.gateway.schema import ChatRequest, Effort
from skydraft.prompts.thinking import Template, Think, template_of

_TYPES: dict[Any, Think] = {"enabled": "on", "disabled": "off", "adaptive": "auto", "True": "on", "False": "off"}


class Arranged(NamedTuple):
    """`settings` are what the template is given; the budget 0 is none. `is_unmet`: the model cannot think as wished."""

    think: Think
    settings: dict[str, Any]
    budget: int
    is_unmet: bool = False


def arranged(body: ChatRequest, vocab: Vocab, default: Think) -> Arranged:
    """What a client says, in its own words, as this model can follow it. Raises Refusal for what cannot apply."""
    template, kwargs = template_of(vocab.chat_template), body.chat_template_kwargs or {}
    _check_kwargs(kwargs, template, vocab.chat_template or "")
    settings = {name: value for name, value in kwargs.items() if name in template.names}
    wanted, effort, budget, is_hint = _wanted(body)
    has_level = bool(effort) and "reasoning_effort" in template.names
    if has_level:
        settings = {"reasoning_effort": effort, **settings}
    if not template.thinks:
        is_unmet = (wanted == "on" and not has_level) or (is_hint and budget > 0)  # an effort is sent to any model
        return Arranged(default, settings, 0 if is_hint else budget, is_unmet)
    cannot_choose = not template.switch and (wanted == "on" or is_hint)
    is_unmet = wanted == "off" and not (template.switch or has_level)
    return Arranged(default if wanted == "auto" or cannot_choose else wanted, settings, budget, is_unmet)


def _wanted(body: ChatRequest) -> tuple[Think, str, int, bool]:
    """From OpenAI's `reasoning_effort` and vLLM's budget, where 0 is none at all: (think, effort, budget, is a hint).

    `reasoning` of OpenAI and OpenRouter, Anthropic's `thinking` and what hosts of open models call it are hints: they
    are sent in every request, whatever the model is, so it is no error where it cannot be.
    """
    asked = None if body.thinking_token_budget == -1 else body.thinking_token_budget
    switch = body.think if body.enable_thinking is None else body.enable_thinking
    hosts = {"effort" if isinstance(switch, str) else "enabled": switch, "max_tokens": body.thinking_budget}
    given = [each for each in (body.reasoning, body.thinking, hosts) if isinstance(each, dict)]
    hint = {name: value for each in given for name, value in each.items() if value is not None}
    own = body.reasoning_effort or ("none" if asked == 0 else None)
    effort: str = own or next((each for each in get_args(Effort) if each == hint.get("effort")), "")
    by_effort: Think = "off" if effort == "none" else "on" if effort else "auto"
    wanted = _TYPES.get(str(hint.get("type", hint.get("enabled"))), by_effort)
    budget = asked or _budget(hint.get("budget_tokens")) or _budget(hint.get("max_tokens"))
    return wanted, effort, budget, not asked and own != "none"


def _check_kwargs(kwargs: Mapping[str, Any], template: Template, text: str) -> None:
    for name, value in kwargs.items():
        param = f"chat_template_kwargs.{name}"
        if name not in template.names and re.search(rf"\b{re.escape(name)}\b", text):
            raise Refusal(400, f"{param}: The chat template uses it, but it cannot be set here.", param=param)
        if name in ("enable_thinking", "thinking") and value and not template.thinks:
            raise Refusal(400, f"{param}: This model's chat template knows no thinking.", param=param)


def _budget(value: Any) -> int:
    return value if type(value) is int and 0 < value < 2**31 else 0
