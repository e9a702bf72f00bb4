"""Attacks by a server that chooses what the client receives."""
