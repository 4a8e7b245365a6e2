"""Model families: what differs between them."""
