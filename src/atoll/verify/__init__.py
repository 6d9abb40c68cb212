"""`atoll verify EXPORT`: from an export back to what made it, without a network."""
