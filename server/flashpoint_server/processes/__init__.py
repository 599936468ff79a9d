"""The processes of a server: parent, children, and their heaps."""
