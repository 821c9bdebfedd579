"""What fewer bits cost in quality: of a decoder's layers, of a training step's gradients."""
