"""Operator tables, and sweeps over library operators of drawn sizes that fill them."""
