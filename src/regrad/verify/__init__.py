"""The suites that ship: random programs whose every step is checked against independent ways to the same answer."""
