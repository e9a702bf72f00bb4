"""The defenses, by the seam at which they act, and the accounting of what they spend."""
