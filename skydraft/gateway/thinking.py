"""What clients say about thinking, each in its own words; and what that means for a chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from skydraft.engines.vocab import Vocab
from skydraft.gateway.refusals import Refusal
from skydraft.prompts.thinking import Think, template_of

_TYPES: dict[Any, Think] = {"enabled": "on", "disabled": "off", "True": "on", "False": "off"}
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


@dataclass(frozen=True, slots=True)
class WantedThinking:
    """`is_hint`: agents say so in every request, whatever the model is, so it is no error where it cannot be."""

    think: Think = "auto"
    effort: str = ""
    budget: int = 0
    is_hint: bool = False


def wanted_thinking(effort: str | None, budget: int | None, *hints: Any) -> WantedThinking:
    """From OpenAI's `reasoning_effort` and vLLM's budget, where 0 is none at all; `reasoning` of OpenAI and OpenRouter,
    Anthropic's `thinking` and what hosts of open models call it are hints."""
    given = (each for each in hints if isinstance(each, dict))
    hint = {name: value for each in given for name, value in each.items() if value is not None}
    effort = "none" if budget == 0 and not effort else effort
    level = effort or next((each for each in get_args(Effort) if each == hint.get("effort")), "")
    by_level: Think = "off" if level == "none" else "on" if level else "auto"
    think = _TYPES.get(str(hint.get("type", hint.get("enabled"))), by_level)
    size = budget or _budget(hint.get("budget_tokens")) or _budget(hint.get("max_tokens"))
    return WantedThinking(think, level, size, is_hint=not budget and effort != "none")


def _budget(value: Any) -> int:
    return value if type(value) is int and 0 < value < 2**31 else 0


def arranged(
    vocab: Vocab, wanted: WantedThinking, kwargs: Mapping[str, Any], default: Think
) -> tuple[Think, dict[str, Any], int]:
    """Whether to think, what the template is given, and the budget (0: none). Raises Refusal for what cannot apply."""
    template = template_of(vocab.chat_template)
    for name, value in kwargs.items():
        param = f"chat_template_kwargs.{name}"
        if name not in template.names and re.search(rf"\b{re.escape(name)}\b", vocab.chat_template or ""):
            raise Refusal(400, f"{param}: The chat template uses it, but it cannot be set here.", param=param)
        if name in ("enable_thinking", "thinking") and value and not template.thinks:
            raise Refusal(400, f"{param}: This model's chat template knows no thinking.", param=param)
    settings = {name: value for name, value in kwargs.items() if name in template.names}
    think, budget = wanted.think if wanted.think != "auto" else default, wanted.budget
    if not template.thinks:
        return default, settings, 0 if wanted.is_hint else budget
    if wanted.effort and "reasoning_effort" in template.names:
        settings = {"reasoning_effort": wanted.effort, **settings}
    if not template.switch and (wanted.think == "on" or wanted.is_hint):
        think = default
    return think, settings, budget
