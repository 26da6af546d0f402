"""Four ways to the same derivative, which share the programs and nothing else.

``reverse`` accumulates over the versions on tapes. ``forward`` carries a Jacobian through a second interpreter that
knows addresses and no versions. ``complex_step`` runs a third one on complex numbers. ``finite`` runs the machine
itself on inputs that differ.
"""
