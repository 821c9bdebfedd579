"""A torch model as an operator graph, captured without weights."""
