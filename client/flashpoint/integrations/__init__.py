"""Other libraries whose attention Flashpoint computes."""
