"""Choose a backend for a problem, from measured rates."""
