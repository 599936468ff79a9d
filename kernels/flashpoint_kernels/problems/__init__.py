"""Problems in normal form, and the rules that all backends share: bounds, masks, pages, dropout, cost."""
