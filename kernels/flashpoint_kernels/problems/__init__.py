"""Describe problems in normal form, with rules that all backends share: bounds, masks, pages, dropout, cost."""
