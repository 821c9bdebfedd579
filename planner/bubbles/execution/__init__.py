"""Real training steps of a multimodal model, cut as a bubble plan cuts them; imports torch."""
