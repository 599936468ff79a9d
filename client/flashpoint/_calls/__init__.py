"""Build the requests of the service's calls, and parse the answers. This package does no I/O."""
