"""The field suite: real bug reports as programs."""
