"""HTTP: checks of the head, and the way of the body from the socket into staging memory."""
