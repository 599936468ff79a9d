"""Register the operators in torch's dispatcher, and run plain calls by a faster path."""
