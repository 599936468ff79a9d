"""The implementation of `flashpoint.sharded`: divide a problem, send the parts to servers, and merge the answers."""
