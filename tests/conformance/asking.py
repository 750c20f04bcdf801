"""What the clients are asked, over which pair, and what the Python interface answers to the same."""

from __future__ import annotations

from typing import Any

from skydraft import DecodingParams, api, make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.toy import ToyEngine, open_toy
from skydraft.gateway.pair import Pair
from skydraft.prompts.messages import conversation

# Unlike the toy's own it shows tools and roles, so that what a client drops on the way changes the text.
_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }};{% endfor %}"
    "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{% endfor %}"
)
_MAX_SEQUENCES = 6
QUESTION = "语速"
ASKED: Any = [{"role": "user", "content": QUESTION}]
CONVERSATION: Any = [
    {"role": "system", "content": "慢"},
    {"role": "user", "content": "语速"},
    {"role": "assistant", "content": "快"},
    {"role": "user", "content": "音调"},
]
MODEL = "skydraft-quality"
MAX_TOKENS = 24
SEED = 5
TOO_LONG = "语" * 5000  # the toy's context holds 4096


def speaking(spec: str) -> ToyEngine:
    """A toy whose template tells roles apart."""
    engine = open_toy(spec, 4096, _MAX_SEQUENCES)
    engine.vocab.chat_template = _TEMPLATE
    return engine


def speaking_pair() -> Pair:
    """A poor drafter and its target."""
    return Pair(speaking("toy:drift=0.2"), speaking("toy"), calibrated=False)


def expected(messages: Any = ASKED, *, mode: str = "quality", tools: Any = (), **params: Any) -> Any:
    """What the Python interface generates, greedily unless said otherwise."""
    request = GenerateRequest(
        conversation(messages),
        plan=make_plan(mode),
        params=DecodingParams(**{"max_new_tokens": MAX_TOKENS, "seed": SEED} | params),
        tools=tools,
    )
    with api.start(request, edge=speaking("toy:drift=0.2"), cloud=speaking("toy")) as generation:
        return generation.run()


def lookup_weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"{city}: 20 degrees"


WEATHER_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "lookup_weather",
        "description": "Look up the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
