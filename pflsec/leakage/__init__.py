"""How much a reconstruction gives away: vault reader, matching, image, label and identity metrics.

Only this package opens the vault. It sees no method, attack or defense: tensors in, numbers out.
"""
