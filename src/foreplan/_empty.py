"""Installed as the ``__init__`` of the four folders (see ``pyproject.toml``); holds nothing."""
