"""The command line: ``main`` and one file per command. Commands load a framework only when they run."""
