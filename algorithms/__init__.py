"""The federated methods, one file each, in the folder of their family."""
