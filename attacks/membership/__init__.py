"""Attacks that tell which of some given images were in the batch, without rebuilding any."""
