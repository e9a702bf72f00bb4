"""Methods that fit no other family, and the control without any communication."""
