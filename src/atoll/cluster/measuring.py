"""`atoll plan --measure`: a short job on one node, whose rates go into the certificate."""

import os
from collections.abc import Sequence

from atoll.cluster.doctor import as_probe
from atoll.cluster.start import start
from atoll.cluster.submit_checks import check
from atoll.config.compose import Composition, compose

PROBE = "atoll.monitor.rate_probe:main"


def measure(overrides: Sequence[str]) -> int:
    """Start it here, or queue it where there is a scheduler; what its start returns."""
    environment = dict(os.environ)
    probe = as_probe(compose([*overrides, "nodes=1"]))
    name = f"measure-{probe.run.facility.name}-{probe.run.ranks_per_node}"
    probe = Composition(probe.run.model_copy(update={"name": name}), probe.sources)
    check(probe.run, False, environment)
    probe.run.folders.facilities.mkdir(parents=True, exist_ok=True)
    return start(probe, False, True, environment, PROBE)
