"""What clients say about thinking, each in its own words; and what that means for a chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skydraft.engines.vocab import Vocab
from skydraft.gateway.refusals import Refusal
from skydraft.prompts.thinking import Think, template_of

_TYPES: dict[Any, Think] = {"enabled": "on", "disabled": "off"}
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class WantedThinking:
    """`is_hint`: agents say so in every request, whatever the model is, so it is no error where it cannot be."""

    think: Think = "auto"
    effort: str = ""
    budget: int = 0
    is_hint: bool = False


def wanted_thinking(effort: Any, reasoning: Any, thinking: Any, budget: Any) -> WantedThinking:
    """From OpenAI's `reasoning_effort` and `reasoning`, OpenRouter's too, Anthropic's `thinking`, and vLLM's budget."""
    reasoning = reasoning if isinstance(reasoning, dict) else {}
    thinking = thinking if isinstance(thinking, dict) else {}
    given, hinted, own = _effort(effort), _effort(reasoning.get("effort")), _budget(budget)
    level = given or hinted
    by_level: Think = "off" if level == "none" else "on" if level else "auto"
    size = own or _budget(thinking.get("budget_tokens")) or _budget(reasoning.get("max_tokens"))
    return WantedThinking(_TYPES.get(thinking.get("type"), by_level), level, size, is_hint=not (given or own))


def _budget(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else 0


def _effort(value: Any) -> str:
    return value if isinstance(value, str) and value in _EFFORTS else ""


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
        if wanted.think == "on" and not wanted.is_hint:
            message = "reasoning_effort: This model's chat template knows no thinking."
            raise Refusal(400, message, param="reasoning_effort")
        return default, settings, 0 if wanted.is_hint else budget
    if wanted.effort and "reasoning_effort" in template.names:
        settings = {"reasoning_effort": wanted.effort, **settings}
    if not template.switch and (wanted.think == "on" or wanted.is_hint):
        think = default
    return think, settings, budget
