"""Defenses inside local training: they stand at every gradient that is taken on data."""
