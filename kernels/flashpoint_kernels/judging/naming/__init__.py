"""Find the cause of a failure: compare answers with known mistakes, and describe where elements are wrong."""
