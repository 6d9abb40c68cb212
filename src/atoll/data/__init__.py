"""From text to packed batches of tokens."""
