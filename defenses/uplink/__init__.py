"""Defenses on what a client sends: they act on the change in its message (pflsec.core.change)."""
