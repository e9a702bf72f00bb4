"""Methods that learn a start from which a few steps lead to a personal model."""
