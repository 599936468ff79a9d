"""Take the pictures of docs/page.md: `python docs/make_screenshots.py URL`. Needs Chromium.

URL is the address of a server without API keys. The program also sends requests to the server, so that the server's
page shows traffic.
"""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Page, expect, sync_playwright

import flashpoint

IMAGES = Path(__file__).resolve().parent / "images"
PATIENCE = 120_000  # timeout in milliseconds for each result on the page; the benchmark is the slowest


def traffic(url: str, over: threading.Event) -> None:
    rng = np.random.default_rng(0)
    with flashpoint.Client(url) as client:
        while not over.wait(float(rng.exponential(0.1))):
            q, k, v = rng.standard_normal((3, 1, 8, int(rng.integers(32, 256)), 64), dtype=np.float32)
            client.attention(q, k, v, causal=True)


def answered(page: Page) -> None:
    """Wait for the playground's result."""
    expect(page.locator("#playground .board .readout")).to_contain_text("weight", timeout=PATIENCE)


def prepared(page: Page) -> None:
    """Run a verification and a benchmark on the page, wait for the playground's result, then wait half a minute."""
    page.locator("#verify form").get_by_role("button", name="Verify").click()
    expect(page.locator("#verify .said")).to_contain_text("Right", timeout=PATIENCE)
    page.locator("#benchmark [name=backends]").fill("naive, tiled, cpu, sdpa_flash")
    page.locator("#benchmark form").get_by_role("button", name="Start").click()
    expect(page.locator("#benchmark .said")).to_contain_text("Done", timeout=PATIENCE)
    expect(page.locator("#benchmark canvas")).to_be_visible(timeout=PATIENCE)
    answered(page)
    page.wait_for_timeout(30_000)


def differentiated(page: Page) -> None:
    """Ask for the gradients of o[8, 8], which belongs to the query "it"."""
    answered(page)
    outputs = page.locator("#playground [data-part=o]")
    for key in (*["ArrowDown"] * 8, *["ArrowRight"] * 8, "Enter"):
        outputs.press(key)
    expect(page.locator("#playground .gradients .told")).to_contain_text("the gradients of o[8, 8]", timeout=PATIENCE)


def take(page: Page, name: str, section: str, width: int, height: int, **how: Any) -> None:
    page.set_viewport_size({"width": width, "height": height})
    page.locator(section).evaluate("element => element.scrollIntoView()")
    page.screenshot(path=IMAGES / f"page-{name}.png", **how)


def main(url: str) -> None:
    IMAGES.mkdir(exist_ok=True)
    over = threading.Event()
    callers = [threading.Thread(target=traffic, args=(url, over)) for _ in range(2)]
    for caller in callers:
        caller.start()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium-headless-shell"))
            page = browser.new_page(reduced_motion="reduce", viewport={"width": 1280, "height": 900})
            page.goto(url)
            prepared(page)
            take(page, "light", "body", 1280, 1080)
            take(page, "phone", "#playground .answer", 390, 844)
            page.set_viewport_size({"width": 1280, "height": 900})
            differentiated(page)
            page.locator("#playground .gradients").screenshot(path=IMAGES / "page-gradients.png")
            page.emulate_media(color_scheme="dark", reduced_motion="reduce")
            take(page, "dark", "#benchmark", 1280, 900)
            browser.close()
    finally:
        over.set()
        for caller in callers:
            caller.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
