"""Tables, figures and pages of runs and campaigns. Never imports torch."""
