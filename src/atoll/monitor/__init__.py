"""What watches a run and never changes it: metrics, loggers, energy, communication, nodes."""
