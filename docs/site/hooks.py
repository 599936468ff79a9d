"""The site's changes to the pages: the README is its front page, and mathematics is MathML."""

from __future__ import annotations

import html
import posixpath
import re
from functools import partial
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

_UPWARDS = re.compile(r"\[([^\[\]]*)\]\((\.\./[^)#]*)(#[^)]*)?\)")
_INTO_DOCS = re.compile(r"\]\(docs/")
_BESIDE = re.compile(r"\]\((?!https?:|docs/|#|mailto:)([^)]*)\)")
_MATHS = re.compile(r'<(span|div) class="arithmatex">\s*(?:\\\(|\\\[)(.*?)(?:\\\)|\\\])\s*</\1>', re.DOTALL)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the page's Markdown. A link to a file that is not documentation becomes the file's name."""
    place = page.file.src_uri
    if place == "README.md":
        front = Path(config.config_file_path).with_name("README.md").read_text(encoding="utf-8")
        front = _INTO_DOCS.sub("](", _BESIDE.sub(r"](../\1)", front))
        markdown = front + "\n" + markdown.replace("# All pages", "## All pages", 1)
    return _UPWARDS.sub(partial(_name, posixpath.dirname(place)), markdown)


def _name(folder: str, link: re.Match[str]) -> str:
    """Return `link` itself where it leads to a page, and else its text with the file's name.

    A link to a test shows the test's name where the reader points: a page has dozens of them.
    """
    path = posixpath.normpath(posixpath.join(folder, link[2]))
    if not path.startswith("../"):
        return link[0]
    path, text = path.removeprefix("../"), link[1]
    if text == "test" and link[3]:
        return f'<abbr title="{path}::{link[3][1:]}">{text}</abbr>'
    return text if path.endswith(text.strip("`")) else f"{text} (`{path}`)"


def on_page_content(content: str, **_: Any) -> str:
    """Return the page's HTML with each formula as MathML, which browsers draw without a script."""
    return _MATHS.sub(_mathml, content)


def _mathml(found: re.Match[str]) -> str:
    display = "block" if found[1] == "div" else "inline"
    return convert(html.unescape(found[2]), display=display)
