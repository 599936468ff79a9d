"""Bugs that chaos/ must find: the file named by FLASHPOINT_TEST_BUG contains the name of the bug, or nothing.

swap   an answer has the numbers of the previous answer that had the same shapes
lose   an answer is never sent
leak   the memory of a request is not released
twice  a write to a cache that is repeated with its idempotency key is executed again
wrong  every answer of a kernel is larger by a quarter
hoard  the memory of an ended cache is still counted as used
"""

import os
from pathlib import Path

EVERY = 5  # with `lose` and `leak`, the bug affects every fifth answer


class Seeded:
    """A bug by name. `there` returns whether it is on; `shows` returns True at every fifth call while it is on."""

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
