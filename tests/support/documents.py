"""The examples of a page: fenced blocks, and whether an output is the one that the page prints."""

BLOCK = r"((?:(?!```).*\n)*)"


def same(found, printed):
    """Equal, but for the last digits of numbers, in which processors differ, and for the name of the CPU's kernel."""
    if isinstance(printed, float):
        return isinstance(found, float) and abs(found - printed) <= 1e-5 * max(1.0, abs(printed))
    if isinstance(printed, list) and isinstance(found, list):
        return len(found) == len(printed) and all(map(same, found, printed))
    if isinstance(printed, dict) and isinstance(found, dict):
        return found.keys() == printed.keys() and all(
            key == "kernel" or same(found[key], printed[key]) for key in printed
        )
    return type(found) is type(printed) and found == printed
