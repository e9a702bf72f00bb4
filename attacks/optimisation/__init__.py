"""Attacks that run the client's own code on a guess and descend until it would have sent what was sent."""
