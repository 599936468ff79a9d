"""The operators in torch's dispatcher, and the fast path of plain calls."""
