"""Integrations of other libraries, whose attention Flashpoint computes."""
