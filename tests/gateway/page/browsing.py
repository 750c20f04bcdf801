"""A browser for tests, which notices what a page must not do; `gateway` is the address that it opens.

Import these fixtures into another conftest and give a `gateway` of your own to try the same page elsewhere.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api")

CHROMIUM = Path("/usr/bin/chromium")
PATIENCE_MS = 30_000  # what must come at all comes within this, however busy the machine is
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
    # In place of the driver's own list. Pages for the address line, which nobody sees, take a second of a core each.
    "--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup,AimEnabled,HttpsUpgrades,LensOverlay,MediaRouter,"
    "NetworkTimeServiceQuerying,OptimizationHints,PaintHolding,PreconnectToSearch,Translate",
]  # fmt: skip
# Violations of the content security policy are events of the document, seen even where the console is silent.
LISTEN = "document.addEventListener('securitypolicyviolation', (e) => console.error('CSP', e.violatedDirective))"
Pages = Callable[..., Any]
playwright.expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """One browser for the tests of a file; while it is there, its driver's event loop runs in this thread."""
    if not CHROMIUM.exists():
        pytest.skip("there is no Chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def problems() -> list[str]:
    """What the page did wrong so far: errors, warnings, violations of the policy, requests to elsewhere."""
    return []


@pytest.fixture
def expected() -> list[str]:
    return []


@pytest.fixture
def open_page(chromium: Any, gateway: str, problems: list[str], expected: list[str]) -> Iterator[Pages]:
    """Opens the page in a fresh profile; at the end there must be no problem but the expected ones."""
    contexts = []

    def opened(**options: Any) -> Any:
        options = {"locale": "en-US", "viewport": {"width": 1280, "height": 800}, **options}
        context = chromium.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        context.add_init_script(LISTEN)
        page = context.new_page()
        _watch(page, gateway, problems)
        page.goto(gateway)
        wired(page)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [each for each in problems if not any(part in each for part in expected)] == []


@pytest.fixture
def page(open_page: Pages) -> Any:
    """The page in English, light, 1280 pixels wide, with its modes loaded."""
    page = open_page()
    page.locator("#mode option").first.wait_for(state="attached")
    return page


def _watch(page: Any, gateway: str, problems: list[str]) -> None:
    def heard(message: Any) -> None:
        if message.type in ("error", "warning"):
            problems.append(message.text)

    def asked(request: Any) -> None:
        if not request.url.startswith((gateway + "/", "data:", "blob:")):
            problems.append(f"a request to {request.url}")

    page.on("console", heard)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", asked)


def wired(page: Any) -> None:
    """Waits for the page's modules: the browser says that the page is loaded while they wait for their texts."""
    page.locator("html[data-theme]").wait_for(state="attached")


def reload(page: Any) -> None:
    page.reload()
    wired(page)


def ask(page: Any, text: str) -> None:
    page.fill("#question", text)
    page.press("#question", "Enter")


def settled(page: Any, count: int, status: str = "done") -> None:
    playwright.expect(page.locator(f'.answer[data-status="{status}"]')).to_have_count(count)


def answered(page: Any, text: str, count: int = 1, status: str = "done") -> None:
    ask(page, text)
    settled(page, count, status)


def expect(locator: Any) -> Any:
    return playwright.expect(locator)


def drawn(page: Any) -> None:
    """Waits until the page has drawn what it knows: some of it is drawn with the next frame."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def is_too_wide(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth > window.innerWidth"))


def grave(page: Any) -> list[str]:
    """Serious and critical findings of axe-core, with the elements they are about."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page).response["violations"]
    return [
        f"{rule['id']}: {node['html']}"
        for rule in found
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]
