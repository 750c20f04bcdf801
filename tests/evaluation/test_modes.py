"""Names of modes: what each plans, and what is refused."""

import pytest

from skydraft.config import MODES, decoding_params
from skydraft.decoding.plan import make_plan
from skydraft.errors import OptionError
from skydraft.lab.evaluation.modes import Mode

from .lines import modes


@pytest.mark.parametrize(("text", "plan", "style"), [
    *((name, {"mode": name}, None) for name in MODES),
    *((text, {"mode": "quality", "k": "2"}, None) for text in ("mode=quality;k=2", " quality ; k = 2 ")),
    ("gate=entropy:2;k=8", {"gate": "entropy:2", "k": "8"}, None),
    ("edge;style=zh-short", {"mode": "edge"}, "zh-short"), ("auto;k=9", {"mode": "auto", "k": 9}, None),
    ("gate=entropy:2+digits", {"gate": "entropy:2+digits"}, None),
])  # fmt: skip
def test_what_a_mode_plans(text: str, plan: dict[str, object], style: str | None) -> None:
    params = decoding_params(style, max_new_tokens=3)
    assert modes(text) == (Mode(text.strip(), make_plan(**plan), params, style),)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "says"), [
    ("turbo", "no mode 'turbo'"), ("quality;k=0", "k must be"), ("quality;k=2;k=3", "k=3 does not fit"),
    ("quality;edge", "edge does not fit"), ("mode=quality;edge", "edge does not fit"),
    ("quality;", "a part of it does not fit"), ("quality;gate=", "gate= does not fit"), (" , ", "No mode"),
    ("quality;colour=red", "colour=red does not fit"), ("quality;style=zh-long", "zh-short"),
])  # fmt: skip
def test_what_is_no_mode(text: str, says: str) -> None:
    with pytest.raises(OptionError) as caught:
        modes(text)
    assert says in str(caught.value)
