"""The predictor of scheduled programs: compact ASTs, parts by theory, trees, and its checks."""
