"""Hooks of MkDocs, which change the pages of the site.

The README becomes the front page, formulas become MathML, links to files of code lead into the repository, and the
search gets a name for screen readers.
"""

from __future__ import annotations

import html
import posixpath
import re
from functools import partial
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

ROOT = Path(__file__).resolve().parents[2]
# Search ranks pages that say how to do something above those that say why.
_BOOST = {"Tutorials": 3, "How-to": 3, "Explanation": 0.5, "Engineering": 0.5}
_EMPTY = re.compile(r"<th([^>]*)></th>")
_UPWARDS = re.compile(r"\[([^\[\]]*)\]\((\.\./[^)#]*)(#[^)]*)?\)")
_INTO_DOCS = re.compile(r"\]\(docs/")
_BESIDE = re.compile(r"\]\((?!https?:|docs/|#|mailto:)([^)]*)\)")
_MATHS = re.compile(r'<(span|div) class="arithmatex">\s*(?:\\\(|\\\[)(.*?)(?:\\\)|\\\])\s*</\1>', re.DOTALL)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the page's Markdown with changed links.

    A link to a file that is not documentation leads into `repo_url`; without a `repo_url` it becomes plain text.
    """
    place = page.file.src_uri
    tab = page.ancestors[-1].title if page.ancestors else ""
    page.meta.setdefault("search", {"boost": _BOOST.get(tab, 1)})
    if place == "README.md":
        front = Path(config.config_file_path).with_name("README.md").read_text(encoding="utf-8")
        front = _INTO_DOCS.sub("](", _BESIDE.sub(r"](../\1)", front))
        markdown = front + "\n" + markdown.replace("# All pages", "## All pages", 1)
    return _UPWARDS.sub(partial(_name, posixpath.dirname(place), (config.repo_url or "").rstrip("/")), markdown)


def _name(folder: str, repository: str, link: re.Match[str]) -> str:
    """Return `link` unchanged if it leads to a page; else a link into `repository`, or text if `repository` is empty.

    A tooltip shows the path, and for a test its name: the limits page has dozens of links with the text "test".
    """
    path = posixpath.normpath(posixpath.join(folder, link[2]))
    if not path.startswith("../"):
        return link[0]
    path, text = path.removeprefix("../"), link[1]
    if repository:
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        shown = path + (f"::{link[3][1:]}" if link[3] else "")
        return f'[{text}]({repository}/{kind}/main/{path} "{shown}")'
    if text == "test" and link[3]:
        return f'<abbr title="{path}::{link[3][1:]}">{text}</abbr>'
    return text if path.endswith(text.strip("`")) else f"{text} (`{path}`)"


def on_page_content(content: str, **_: Any) -> str:
    """Return the page's HTML with each formula as MathML, and with empty column headings of tables as plain cells."""
    return _EMPTY.sub(r"<td\1></td>", _MATHS.sub(_mathml, content))


def on_post_page(output: str, **_: Any) -> str:
    """Return the page with an ARIA label for the theme's search."""
    dialog = 'data-md-component="search" role="dialog"'
    return output.replace(dialog, f'{dialog} aria-label="Search"')


def on_post_template(output_content: str, **_: Any) -> str:
    """Return the page for missing addresses, 404.html, with an ARIA label for the theme's search."""
    return on_post_page(output_content)


def _mathml(found: re.Match[str]) -> str:
    """Return a formula as MathML. A formula on its own line can be scrolled if it is wider than the screen."""
    if found[1] == "div":
        return f'<div class="formula" tabindex="0">{convert(html.unescape(found[2]), display="block")}</div>'
    return convert(html.unescape(found[2]), display="inline")
