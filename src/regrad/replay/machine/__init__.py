"""The reference machine: a model of stateful training steps small enough to be checked by brute force."""
