"""Find words that this project does not use in its documentation and sources: `python tests/words.py [FILES]`.

docs/contributing.md has the rules, with examples. No sentence may open with "Of", "What", "Who" or "That which", except
a question that ends with "?". The whole text of a file is searched: code, comments and strings alike. A capital letter
marks the start of a sentence. Words in backquotes, and these words in quotation marks, are allowed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
READ = {".conf", ".css", ".html", ".js", ".md", ".proto", ".py", ".sh", ".toml", ".tpl", ".yaml", ".yml"}
READ_NAMES = {"Dockerfile", "Makefile"}
# The text between two words: whitespace, the start of a comment on the next line, or the join of two string literals.
GAP = r"""(?:\s|#|//|["']\s*\n\s*f?["'])+"""
OPENING = re.compile(rf"(?<![\w`\[])(?:Of|What|Who|That{GAP}which)(?=\s)(?!\s*=)")
# The rest of a question, up to its "?". It ends before a new sentence, paragraph, table cell or string begins.
QUESTION = re.compile(r"""(?:(?!\n\s*\n|[.!:;]\s)[^?"|])*\?""")
PHRASE = re.compile(rf"(?<![\w`])(?:one[’']s|whoever|such{GAP}as{GAP}would|is{GAP}said{GAP}to)\b", re.IGNORECASE)
QUOTED = re.compile(r'(?<!")"(?:Of|What|Who|That which|one[’\']s|whoever|such as would|is said to)"(?!")')
CODE = re.compile(r"(`+)[^\n]+?\1")


def violations(text: str, markdown: bool) -> Iterator[tuple[int, str]]:
    """Yield the line number, and up to 60 characters of the text, of each place that breaks a rule."""
    for quoted in [QUOTED, *([CODE] if markdown else [])]:
        text = quoted.sub(lambda match: "`" * len(match[0]), text)
    openings = [match for match in OPENING.finditer(text) if not QUESTION.match(text, match.end())]
    for match in sorted([*openings, *PHRASE.finditer(text)], key=re.Match.start):
        yield text.count("\n", 0, match.start()) + 1, " ".join(text[match.start() : match.start() + 60].split())


def sources() -> list[Path]:
    """Return the repository's text files that the rules apply to, except this file and its test."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [ROOT / line for line in listed.splitlines()]
    shown = [path for path in paths if (path.suffix in READ or path.name in READ_NAMES) and path.is_file()]
    return [path for path in shown if path.stem not in ("words", "test_words")]  # these two contain the forbidden words


def main() -> int:
    files = [Path(name).resolve() for name in sys.argv[1:]] or sources()
    places = [
        f"{path.relative_to(ROOT)}:{line}: {words}"
        for path in files
        for line, words in violations(path.read_text(encoding="utf-8"), path.suffix == ".md")
    ]
    print("\n".join(places), end="\n" if places else "")
    if places:
        print(f"{len(places)} places to rewrite: see Words in docs/contributing.md", file=sys.stderr)
    return 1 if places else 0


if __name__ == "__main__":
    sys.exit(main())
