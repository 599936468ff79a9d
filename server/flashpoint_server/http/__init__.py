"""HTTP: from the socket's bytes to a request's body in its place, and the rules for a request's head."""
