"""One gateway for all clients: over which pair, what they are asked, and what the Python interface answers to it."""

from collections.abc import Iterator
from typing import Any, Literal

import pytest

from skydraft import DecodingParams, api, make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.toy import ToyEngine, open_toy
from skydraft.gateway.pair import Pair
from skydraft.prompts.messages import conversation
from tests.gateway.interfaces import call_text
from tests.gateway.running import Running, gateway, scripted_pair

# Unlike the toy's own it shows roles and tools, so that what a client drops on the way changes the text.
_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }};{% endfor %}"
    "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}<tool_call>\n{{ call['function'] | tojson }}\n</tool_call>{% endfor %}"
    "{% endfor %}"
)
QUESTION = "语速"
ASKED: Any = [{"role": "user", "content": QUESTION}]
CONVERSATION: Any = [{"role": "system", "content": "慢"}, *ASKED]
CONVERSATION += [{"role": "assistant", "content": "快"}, {"role": "user", "content": "音调"}]
MODEL = "skydraft-lossless"
MAX_TOKENS = 24
SEED = 5
ENOUGH = 900  # characters of eight calls
TOO_LONG = "语" * 5000  # the toy's context holds 4096


def speaking(spec: str) -> ToyEngine:
    """A toy whose template tells roles apart."""
    engine = open_toy(spec, 4096, 6)
    engine.vocab.chat_template = _TEMPLATE
    return engine


def speaking_pair() -> Pair:
    """A poor drafter and its target."""
    return Pair(speaking("toy:drift=0.2"), speaking("toy"))


def expected(messages: Any = ASKED) -> Any:
    """What the Python interface generates."""
    params = DecodingParams(max_new_tokens=MAX_TOKENS, seed=SEED)
    request = GenerateRequest(conversation(messages), make_plan("lossless"), params)
    with api.start(request, edge=speaking("toy:drift=0.2"), cloud=speaking("toy")) as generation:
        return generation.run()


def pick_city(city: Literal["上海", "北京"], days: Literal[1, 2, 3]) -> str:
    """Pick a city for some days."""
    return f"{city}{days}"


@pytest.fixture(scope="session")
def served() -> Iterator[Running]:
    """A gateway over a toy pair."""
    with gateway(speaking_pair()) as running:
        yield running


@pytest.fixture(scope="session")
def called() -> Iterator[Running]:
    """A gateway over a pair that answers a question by a call."""
    steps = [call_text("pick_city", {"city": "上海", "days": 3}), "done"]
    with gateway(scripted_pair(steps)) as running:
        yield running
