"""Attacks that compute the image from what was sent, without any search."""
