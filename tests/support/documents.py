"""Compare the output of an example in the documentation with the output that its page shows."""

BLOCK = r"((?:(?!```).*\n)*)"


def same(actual, printed):
    """Return whether both are equal, except for the last digits of floats and the value of "kernel"."""
    if isinstance(printed, float):
        return isinstance(actual, float) and abs(actual - printed) <= 1e-5 * max(1.0, abs(printed))
    if isinstance(printed, list) and isinstance(actual, list):
        return len(actual) == len(printed) and all(map(same, actual, printed))
    if isinstance(printed, dict) and isinstance(actual, dict):
        return actual.keys() == printed.keys() and all(
            key == "kernel" or same(actual[key], printed[key]) for key in printed
        )
    return type(actual) is type(printed) and actual == printed
