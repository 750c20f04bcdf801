"""What clients say about thinking, each in its own words; and what that means for a chat template."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from skydraft.engines.vocab import Vocab
from skydraft.gateway.refusals import Refusal
from skydraft.gateway.schema import ChatRequest, Effort
from skydraft.prompts.thinking import Template, Think, template_of

_TYPES: dict[Any, Think] = {"enabled": "on", "disabled": "off"}


class Arranged(NamedTuple):
    """`settings` are what the template is given; the budget 0 is none. `is_unmet`: the model cannot think as wished."""

    think: Think
    settings: dict[str, Any]
    budget: int
    is_unmet: bool = False


def arranged(body: ChatRequest, vocab: Vocab, default: Think) -> Arranged:
    """From OpenAI's `reasoning_effort` and vLLM's budget. Raises Refusal for what cannot apply.

    `reasoning` of OpenAI and OpenRouter and Anthropic's `thinking` are hints: agents send them in every request,
    whatever the model is, so it is no error where it cannot be.
    """
    template, kwargs = template_of(vocab.chat_template), body.chat_template_kwargs or {}
    _check_kwargs(kwargs, template, vocab.chat_template or "")
    settings = {name: value for name, value in kwargs.items() if name in template.names}
    hints = [each for each in (body.reasoning, body.thinking) if isinstance(each, dict)]
    hint = {name: value for each in hints for name, value in each.items()}
    effort: str = body.reasoning_effort or ""
    effort = effort or next((each for each in get_args(Effort) if each == hint.get("effort")), "")
    by_effort: Think = "off" if effort == "none" else "on" if effort else "auto"
    wanted, asked = _TYPES.get(str(hint.get("type")), by_effort), max(body.thinking_token_budget or 0, 0)
    budget = asked or _budget(hint.get("budget_tokens")) or _budget(hint.get("max_tokens"))
    is_hint = not (body.reasoning_effort or asked)
    if not template.thinks:
        is_unmet = wanted == "on" or (is_hint and budget > 0)  # gateways forward an effort to any model
        return Arranged(default, settings, 0 if is_hint else budget, is_unmet)
    if effort and "reasoning_effort" in template.names:
        settings = {"reasoning_effort": effort, **settings}
    cannot_choose = not template.switch and (wanted == "on" or is_hint)
    return Arranged(default if wanted == "auto" or cannot_choose else wanted, settings, budget)


def _check_kwargs(kwargs: Mapping[str, Any], template: Template, text: str) -> None:
    for name, value in kwargs.items():
        param = f"chat_template_kwargs.{name}"
        if name not in template.names and re.search(rf"\b{re.escape(name)}\b", text):
            raise Refusal(400, f"{param}: The chat template uses it, but it cannot be set here.", param=param)
        if name in ("enable_thinking", "thinking") and value and not template.thinks:
            raise Refusal(400, f"{param}: This model's chat template knows no thinking.", param=param)


def _budget(value: Any) -> int:
    return value if type(value) is int and 0 < value < 2**31 else 0
