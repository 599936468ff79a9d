"""Verification while serving: an idle engine computes a share of its own answers again in float64."""
