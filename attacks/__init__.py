"""The attacks. Each is a function of a capture; none imports a method, opens the vault, or sees the truth."""
