"""Bugs that chaos/ must find: the file named by FLASHPOINT_TEST_BUG contains the name of the bug, or nothing.

swap   an answer is that of the last one of its shape      lose   an answer is never sent
leak   the memory of a request is not released       twice  a repeated write to a cache is written again
hoard  the memory of an ended cache stays counted
"""

import os
from pathlib import Path

EVERY = 5  # every fifth answer is lost, or its memory leaks


class Seeded:
    """Count occasions, and decide at which of them the bug shows."""

    def __init__(self, name):
        self.name = name
        self.count = 0

    def there(self):
        path = os.environ.get("FLASHPOINT_TEST_BUG")
        return path is not None and Path(path).read_text() == self.name

    def shows(self):
        if not self.there():
            return False
        self.count += 1
        return self.count % EVERY == 0
