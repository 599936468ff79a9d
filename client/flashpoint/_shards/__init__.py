"""The implementation of `flashpoint.sharded`: it cuts a problem, asks the servers, and merges their answers."""
