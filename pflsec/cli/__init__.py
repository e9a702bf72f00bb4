"""The command line: one module per command, and no logic beyond options and printing."""
