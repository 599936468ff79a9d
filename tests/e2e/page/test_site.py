"""The documentation site fits a phone, passes axe, and its search works, in a real browser."""

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.support.browser import PATIENCE_MS

ROOT = Path(__file__).resolve().parents[3]
REPOSITORY = "https://example.com/flashpoint"
SCREENS = [(scheme, width) for scheme in ("light", "dark") for width in (1280, 390)]
OPPOSITES = [SCREENS[0], SCREENS[-1]]  # each scheme and each width once
# Pages with different kinds of content: tables, formulas, pictures, an API reference.
PAGES = ("index", "algorithm", "page", "reproduce", "reference/api", "settings", "security")
SLOWEST = "reference/api"  # axe takes 18 s there, as long as on 40 other pages


# Marked slow, so that `make test` skips this file: `make docs` also builds these pages, and fails at a broken link.
pytestmark = pytest.mark.slow


class Site(NamedTuple):
    folder: Path
    url: str

    @property
    def pages(self):
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*.html"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the documentation site with links to the repository REPOSITORY, and serve it over HTTP."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    environment = os.environ | {"FLASHPOINT_REPOSITORY": REPOSITORY, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)

    class Files(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Site(folder, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()


@pytest.fixture
def opened(chromium):
    """Yield `new(scheme, width)`, which opens an empty browser page with a colour scheme and a width in pixels."""
    contexts = []

    def new(scheme="light", width=1280):
        context = chromium.new_context(
            color_scheme=scheme, viewport={"width": width, "height": 900}, reduced_motion="reduce"
        )
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        return context.new_page()

    yield new
    for context in contexts:
        context.close()


def broken(page, url):
    """Open a page of the site; return (rule, up to three elements) of each violation that axe finds."""
    page.goto(url)
    page.wait_for_function(
        "document.querySelectorAll('pre > code').length === 0 || document.querySelector('.md-code__nav')"
    )
    violations = Axe().run(page).response["violations"]
    return [(v["id"], [n["target"] for n in v["nodes"]][:3]) for v in violations]


@pytest.mark.parametrize(("scheme", "width"), OPPOSITES)
def test_axe_finds_nothing(site, opened, scheme, width):
    page = opened(scheme, width)
    pages = PAGES if scheme == "dark" else [name for name in PAGES if name != SLOWEST]
    violations = {name: broken(page, f"{site.url}/{name}.html") for name in pages}
    assert violations == {name: [] for name in pages}
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 3 * 64) == (scheme == "dark")


def test_no_page_leaves_out_a_level_of_headings_or_the_name_of_a_dialog(site):
    """Search every page for two faults that depend on its text, because axe on every page would take minutes."""
    faults = []
    for name in site.pages:
        text = (site.folder / name).read_text()
        levels = [int(level) for level in re.findall("<h([1-6])[ >]", text.partition("<article")[2])]
        faults += [(name, lower) for upper, lower in pairwise([0, *levels]) if lower > upper + 1]
        faults += [(name, tag) for tag in re.findall("<[^>]*role=.dialog[^>]*>", text) if "aria-label=" not in tag]
    assert faults == []


@pytest.mark.full
@pytest.mark.parametrize(("scheme", "width"), SCREENS)
def test_axe_finds_nothing_on_any_page(site, opened, scheme, width):
    page = opened(scheme, width)
    violations = {name: broken(page, f"{site.url}/{name}") for name in site.pages}
    assert violations == {name: [] for name in site.pages}


def test_no_page_is_wider_than_a_phone(site, opened):
    page = opened(width=390)
    wide = {}
    for name in site.pages:
        page.goto(f"{site.url}/{name}")
        wide[name] = page.evaluate("document.documentElement.scrollWidth")
    assert len(wide) > 50
    assert {name: width for name, width in wide.items() if width > 390} == {}


@pytest.mark.parametrize(
    ("words", "heading"), [("rotate a key", "Rotate a key"), ("upgrade", "Upgrade"), ("nano", "The smallest kernel")]
)
def test_search_finds(site, opened, words, heading):
    page = opened()
    page.goto(f"{site.url}/index.html")
    page.get_by_role("textbox", name="Search").first.click()
    page.keyboard.type(words)
    first = page.locator(".md-search-result__item").first
    expect(first).to_contain_text(heading)


def test_paths_of_code_and_the_notebook_lead_into_the_repository(site):
    algorithm = (site.folder / "algorithm.html").read_text()
    linked = set(re.findall(rf'href="{REPOSITORY}/((?:blob|tree)/main/[^"]+)"', algorithm))
    assert {"blob/main/examples/attention.ipynb", "blob/main/kernels/flashpoint_kernels/nano.py"} <= linked
    every = "".join((site.folder / name).read_text() for name in site.pages)
    for kind, path in set(re.findall(rf'href="{REPOSITORY}/(blob|tree)/main/([^"#]+)"', every)):
        assert (ROOT / path).is_dir() == (kind == "tree"), path
        assert (ROOT / path).exists(), path
