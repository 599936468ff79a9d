"""Send a request to a server and read the answer while it arrives: connections, HTTP/1.1 and retries."""
