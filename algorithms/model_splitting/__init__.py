"""Methods that share a part of the network and keep the rest personal."""
