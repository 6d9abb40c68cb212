"""From a typed run to a job: schedulers, launchers, containers. Never imports torch."""
