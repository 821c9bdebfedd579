"""What operators take on one device by its rates: of a processor, or fitted to a few tasks."""
