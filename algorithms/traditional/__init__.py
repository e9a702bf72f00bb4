"""Methods with one global model."""
