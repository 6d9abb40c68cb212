"""Build, check and name container images. Never imports torch."""
