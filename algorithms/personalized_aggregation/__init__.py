"""Methods in which each client gets an aggregate of its own."""
