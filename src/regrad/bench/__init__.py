"""The experiments that ship: ``python -m regrad.bench``. Results go to ``benchmarks/results``."""
