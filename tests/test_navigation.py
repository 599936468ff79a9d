"""The site's navigation has what a user needs, in a number of words that somebody can read."""

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
MOST_WORDS = 60_000
RECORDS = (
    "measurements/",
    "compiled.md",
    "gpu-day.md",
    "fuzzing.md",
    "licences.md",
    "reference/transformers-models.md",
)


class _Loader(yaml.SafeLoader):
    """A loader that reads the tags of mkdocs.yml as None."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: None)


def pages(entry):
    """Yield the paths of all pages of a part of the navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for each in entry.values() if isinstance(entry, dict) else entry:
            yield from pages(each)


def test_the_navigation_has_few_words_and_no_records():
    listed = list(pages(yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"]))
    assert len(set(listed)) == len(listed)
    assert [page for page in listed if page.startswith(RECORDS)] == []
    texts = [(ROOT / "README.md").read_text(), *((ROOT / "docs" / page).read_text() for page in listed)]
    words = sum(len(text.split()) for text in texts)
    assert words <= MOST_WORDS, f"{words} words: take a page out of mkdocs.yml, or merge two that say the same"


def test_commands_and_settings_are_one_page_each():
    assert "#### " not in (ROOT / "docs/cli.md").read_text()
    for page, part in (("cli.md", "### flashpoint verify"), ("settings.md", "`FLASHPOINT_QUEUE_BYTES`")):
        holders = [path for path in (ROOT / "docs").rglob("*.md") if part in path.read_text()]
        assert holders == [ROOT / "docs" / page]
