"""Each figure in docs/images has the texts of a figure drawn anew from its results, and its texts are legible."""

import re
from html import unescape
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
from docs.figures import every
from flashpoint.plots import style
from tests.support.pictures import check, laid_out

DOCS = Path(__file__).resolve().parents[1] / "docs"
DRAWN = every()


def texts(picture):
    return sorted(unescape(text) for text in re.findall(r"<text[^>]*>(?:<tspan[^>]*>)?([^<]+)", picture))


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_is_that_of_its_results_and_can_be_read(name):
    check(laid_out(DRAWN[name]))
    stored = (DOCS / "images" / f"{name}.svg").read_text()
    assert texts(stored) == texts(style.saved(DRAWN[name], "svg").decode()), "run python -m docs.make_figures"


def test_every_picture_of_a_page_is_there_and_has_a_text_for_those_who_do_not_see_it():
    shown = {}
    for page in DOCS.rglob("*.md"):
        for text, path in re.findall(r"!\[([^\]]*)\]\((?!https?:)([^)]+)\)", page.read_text()):
            assert len(text.split()) >= 3, (page.name, path)
            shown[(page.parent / path).resolve()] = text
    stored = {path for path in (DOCS / "images").iterdir() if path.name != "overview.svg"}  # only the README shows it
    assert set(shown) == stored
    assert {path.stem for path in stored if path.suffix == ".svg"} == set(DRAWN)
