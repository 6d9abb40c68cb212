"""A facility's constraints, made on this machine, and a small run under them."""
