"""Failing inputs that users of similar tools reported, a test each: README.md says which, and where the others are proven."""
