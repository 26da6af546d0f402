"""The cohort's programs and the modes that they run under (``regrad verify cohort``): ``python -m regrad.torch.cohort``."""
