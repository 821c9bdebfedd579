"""From a captured graph to the steps that a pass runs: forward, backward, update."""
