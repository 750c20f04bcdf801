"""The page at a real gateway: what holds anywhere, and a cloud that dies in mid-answer and comes back."""

from __future__ import annotations

from typing import Any

import pytest

from ..page.browsing import ask, expect, settled
from ..page.test_anywhere import test_a_conversation_of_two_turns  # noqa: F401
from .conftest import Target

pytestmark = pytest.mark.browser


def test_the_cloud_dies_in_mid_answer_and_comes_back(page: Any, target: Target) -> None:
    target.lags = True
    ask(page, "语速" * 20)
    expect(page.locator(".run[data-origin=accepted], .run[data-origin=recovered]").first).to_be_attached()
    target.kill()
    expect(page.locator(".run[data-origin=edge-fallback]").first).to_be_attached()
    page.keyboard.press("Escape")  # an answer of a toy is long
    settled(page, 1, "stopped")
    target.start()
    ask(page, "情绪")
    again = page.locator(".answer").nth(1).locator(".run[data-origin=accepted], .run[data-origin=recovered]")
    expect(again.first).to_be_attached()
    page.keyboard.press("Escape")
