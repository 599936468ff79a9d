"""/benchmark: timings beside other requests, their state and their pictures."""
