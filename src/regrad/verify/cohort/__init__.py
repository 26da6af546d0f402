"""The cohort: what torch's checkpoints and ours leave on programs with state."""
