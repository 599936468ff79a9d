"""The claims of the papers and projects that this project builds on, measured on this device.

`claims.reproduce(only)` yields events as plain dicts, ready for JSON:

    {"type": "environment", "environment": {…}}                        first, and again at the end with the peaks
    {"type": "claim", "name": …, "number": 1, "total": 12, "seconds_left": …, "most_seconds_left": …}   a claim begins
    {"type": "progress", "what": "forward · naive · N 512"}            it continues
    {"type": "row", "row": {…}}                                        something was timed; keys as `timing.ROW_FIELDS`
    {"type": "verdict", "name": …, "source": …, "claim": …, "measured": …, "verdict": …, "how": …, "seconds": …}

A verdict is PASS, FAIL, or names what this machine lacks, for example "needs a GPU". If other programs disturbed the
timings of a claim, the verdict is "needs a quiet machine"; a claim about bytes does not depend on them. A claim that
takes over `most_seconds_left` of its own ends with "needs more than N s here".
"""

NAMES = (
    "precision", "table", "speed", "memory", "exercises", "flash-attn", "gpt", "lora", "nano", "lengths", "cudnn",
    "equations", "traffic",
)  # fmt: skip
