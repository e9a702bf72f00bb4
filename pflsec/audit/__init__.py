"""Audits: a method and its baselines, trained on the same splits and seeds, attacked alike, and judged in words.

plan      what is to be run: cells of a method, a defense and a seed
folder    an audit's folder: the state of every cell, and how cells are run
verdict   what the finished cells say, from their run folders alone
skeleton  the text of a new method, and of its test
"""
