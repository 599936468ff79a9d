"""HTTP: checks of a request's head, and the transfer of its body from the socket into staging memory."""
