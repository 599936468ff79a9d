"""Who may call, and how much: keys, their limits, and the limits of the whole service."""
