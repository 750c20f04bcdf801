"""Captions say what they are asked to say, in fluent Chinese, and can be read back."""

import numpy as np
import pytest

from recipes.tiny_omni.attributes import CLASSES, draw
from recipes.tiny_omni.captions import caption, is_fluent, read_attributes
from recipes.tiny_omni.wording import WORDINGS


def test_captions_keep_the_rules_and_can_be_read_back() -> None:
    for seed in range(400):
        attributes = draw(np.random.default_rng(seed))
        text = caption(attributes, seed)
        assert read_attributes(text) == attributes.as_dict() and is_fluent(text)


def test_wording_and_order_vary_with_the_seed_alone() -> None:
    attributes = draw(np.random.default_rng(1))
    first, again = ([caption(attributes, seed) for seed in range(100)] for _ in range(2))
    assert first == again and len(set(first)) > 90 and len({text[:2] for text in first}) > 8


@pytest.mark.parametrize("name", CLASSES)
def test_the_first_character_decides_the_class(name: str) -> None:
    first = [wording[0] for value in CLASSES[name] for wording in WORDINGS[name, value]]
    assert len(set(first)) == len(first)


@pytest.mark.parametrize(("text", "read"), [
    ("", {}), ("今天天气很好。", {}), ("语速听起来飞快。", {"rate": "fast"}), ("飞快，低沉，语速听起来。", {}),
    ("开口的人是一位姑娘，间歇很少。", {"speaker": "female", "pauses": "few"}),
])  # fmt: skip
def test_what_is_not_stated_is_none(text: str, read: dict[str, str]) -> None:
    assert read_attributes(text) == dict.fromkeys(CLASSES) | read


@pytest.mark.parametrize("text", [
    "语速听起来飞快。", "这段录音里说话的是一位男士，语速听起来飞快，声调低沉，声量轻柔，间歇很少",
    "这段录音里说话的是一位男士，语速听起来飞快，声调低沉，声量轻柔，很少。",
    "这段录音里说话的是一位男士，语速听起来飞快快，声调低沉，声量轻柔，间歇很少。",
    "这段录音里说话的是一位男士，语速听起来飞快，声调低沉，声量低沉，间歇很少。",
], ids=["short", "no full stop", "early comma", "doubled", "said twice"])  # fmt: skip
def test_broken_rules_are_seen(text: str) -> None:
    assert not is_fluent(text)
