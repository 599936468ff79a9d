"""The claims of the papers and projects that this one builds on, measured on the device at hand.

`claims.reproduce(only)` yields what happens as plain dicts, ready for JSON:

    {"type": "environment", "environment": {…}}                        first, and once more, with the peaks
    {"type": "claim", "name": …, "number": 1, "total": 12}             a claim begins
    {"type": "progress", "what": "forward · naive · N 512"}            it goes on
    {"type": "row", "row": {…}}                                        something was timed; keys as `timing.ROW_FIELDS`
    {"type": "verdict", "name": …, "source": …, "claim": …, "measured": …, "verdict": …, "how": …, "seconds": …}

A verdict is PASS, FAIL, or says what is missing here, as "needs a GPU" does.
"""
