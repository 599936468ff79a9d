"""Describe attention problems in one form for all backends, with the rules for bounds, masks, pages, dropout, cost."""
