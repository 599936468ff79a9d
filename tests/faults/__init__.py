"""A bank of faults: small wrong edits, and the tests that should find each of them."""
