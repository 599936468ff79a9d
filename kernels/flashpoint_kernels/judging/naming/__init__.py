"""Name the cause of a failure: known mistakes beside the answers, and where wrong elements are."""
