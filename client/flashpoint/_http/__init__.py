"""One exchange with a server: connections, HTTP/1.1, retries, and the answer as it arrives."""
