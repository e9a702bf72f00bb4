"""The vocabulary of pflsec: items, methods, attacks, defenses, captures, streams, errors, the registry, the vault's writer.

Nothing here imports another part of pflsec, and importing this package imports no torch.
"""
