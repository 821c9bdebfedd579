"""Carries out precision plans: low-precision modules, one rank's kernels, training runs."""
