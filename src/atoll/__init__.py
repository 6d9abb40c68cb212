"""Train language models on any supercomputer from one recipe, one configuration, one batch file."""
