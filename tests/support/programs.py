"""Import programs of the repository that belong to no package."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def load(path):
    """Load the program at `path`, relative to the repository's root, and return it as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
