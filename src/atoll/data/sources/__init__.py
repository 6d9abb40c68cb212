"""Documents from the standard library, from files or from a hub data set, read by ranges."""
