"""Passes of networks as they really run, whole and call by call: the end-to-end check."""
