"""Configuration of runs and attacks: what the command line and Python accept, validated before anything runs."""
