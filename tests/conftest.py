"""Settings of the whole test run."""

from __future__ import annotations

import os

from hypothesis import settings

# Compiling and machines shared with others make single examples slow at random; on CI the examples
# are the same in every run.
settings.register_profile(
    "foreplan", deadline=None, max_examples=60, derandomize="CI" in os.environ
)
settings.load_profile("foreplan")
