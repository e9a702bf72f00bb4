"""Datasets, their partition over clients, and the federation that training reads from.

Importing this package imports nothing else: `pflsec list` reads the dataset cards from the source.
"""
