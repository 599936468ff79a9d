"""`python -m flashpoint`: the command line, if its script is not on the PATH."""

import sys

from flashpoint.cli import main

sys.exit(main())
