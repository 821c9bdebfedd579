"""Descriptions of models, from folders, the zoo or fields; their weights and texts."""
