"""The parts of `flashpoint.sharded`: where a problem is cut, what each server is asked, how the answers are merged."""
