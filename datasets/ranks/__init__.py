"""What lies between ranks: links, collectives, neighbours that slow each other down."""
