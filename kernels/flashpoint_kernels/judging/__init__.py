"""Judge attention functions: see `judge` and docs/judge.md."""

from flashpoint_kernels.judging.judge import Progress as Progress
from flashpoint_kernels.judging.judge import judge as judge
from flashpoint_kernels.judging.signatures import UnusableError as UnusableError
