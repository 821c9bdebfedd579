"""The predictor of library operators: structure by operator, trees by chip, mixed by likeness."""
