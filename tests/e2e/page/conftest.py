"""Fixtures that open web pages of a real server in headless Chromium."""

import shutil

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.support.browser import PATIENCE_MS

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.fixture(scope="module")
def chromium():
    if CHROMIUM is None:
        pytest.skip(
            "needs Chromium: install Debian's package chromium-headless-shell (apt-get install chromium-headless-shell)"
        )
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, timeout=PATIENCE_MS)
        yield browser
        browser.close()
    expect.set_options(timeout=5000)  # milliseconds, Playwright's default


@pytest.fixture
def open_page(chromium):
    """Yield `open_page(server, path, prepare, **context)`, which calls `prepare(page)` and then loads the page.

    After the test, check that scripts raised no errors, no Content-Security-Policy was violated, and all requests went
    to the page's server.
    """
    opened = []

    def open_at(server, path="/", prepare=lambda page: None, **how):
        context = chromium.new_context(reduced_motion="reduce", **{"viewport": {"width": 1280, "height": 900}, **how})
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        complaints, requests = [], []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: complaints.append(line.text) if "Security Policy" in line.text else None)
        page.on("request", lambda request: requests.append(request.url))
        opened.append((context, server.url, complaints, requests))
        prepare(page)
        page.goto(f"{server.url}{path}")
        return page

    yield open_at
    for context, url, complaints, requests in opened:
        context.close()
        assert complaints == []
        assert [one for one in requests if not one.startswith((f"{url}/", "blob:"))] == []


@pytest.fixture
def page(open_page, server):
    page = open_page(server)
    expect(page.locator("#health")).to_have_text("Ready")
    return page
