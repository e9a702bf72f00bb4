"""Attacks that read the data off a message by algebra, without any search."""
