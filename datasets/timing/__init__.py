"""Timing programs on one device, in a process that may die, and writing its profile."""
