"""The clients, and the objects that they return."""
