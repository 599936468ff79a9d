"""One sweep of random problems over every kernel, beside the oracle (tests/support/oracle.py)."""
