"""Local training: the one loop of SGD, under two interpreters."""
