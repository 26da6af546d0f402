"""Finds the state that a region touches: tensors, Python values and containers, generators, modes."""
