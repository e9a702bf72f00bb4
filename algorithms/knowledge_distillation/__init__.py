"""Methods that exchange knowledge (prototypes, logits) rather than weights alone."""
