"""Pictures of the chat page, at a gateway over the demo pair.

    python -m bench.screenshots FOLDER

Wants Debian's packages chromium and fonts-noto-cjk.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from bench.gateway import gateway, load_real

_FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
_QUESTION = "请用一句话描述海边日落的景色。"
_NEXT = "再用一句话描述清晨的山谷。"
_VIEWS: dict[str, dict[str, Any]] = {
    "chat": {"viewport": {"width": 1280, "height": 800}, "locale": "en-US"},
    "chat-dark-zh": {"viewport": {"width": 1280, "height": 800}, "locale": "zh-CN", "color_scheme": "dark"},
    "chat-phone": {"viewport": {"width": 360, "height": 740}, "locale": "zh-CN"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with gateway(load_real()) as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=_FLAGS)
        for name, view in _VIEWS.items():
            page = browser.new_context(**view).new_page()
            page.goto(url.removesuffix("/v1/chat/completions"))
            page.evaluate("localStorage.clear()")
            for number, question in enumerate((_QUESTION, _NEXT), 1):
                page.fill("#question", question)
                page.press("#question", "Enter")
                page.locator('.answer[data-status="done"]').nth(number - 1).wait_for(timeout=300_000)
            page.screenshot(path=str(folder / f"{name}.png"))
        browser.close()


if __name__ == "__main__":
    main()
