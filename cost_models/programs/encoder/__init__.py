"""The visitor of TIR: from a saved module to the computation vectors of its leaves, compiled."""
