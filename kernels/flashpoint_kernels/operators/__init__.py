"""Register attention and its gradient as operators of torch; run calls with only q, k and v by a faster path."""
