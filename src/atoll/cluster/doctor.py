"""`atoll doctor`: is this facility ready, and with --job, are its devices and links as stated."""

import json
import os
from dataclasses import asdict

from atoll.cluster.facility_checks import OK, WRONG, Finding, all_findings
from atoll.cluster.submit import check, start, with_allocated_nodes
from atoll.config.compose import Composition, compose_all, split_options

PROBE = "atoll.monitor.node_probe:main"
OPTIONS = {"--job", "--here", "--json", "--help", "-h"}
USAGE = """usage: atoll doctor [--json] [--job [--here]] facility=NAME [KEY=VALUE …]

Asks of a facility, on its login node, all that a run will need, and says how to fix what is wrong.
--job     then queue a job whose ranks report devices, bindings, links and their bandwidth
--here    with --job: run it in this allocation; without a scheduler it runs here anyway
--json    print the findings as JSON"""


def main(argv: list[str]) -> int:
    """Print the findings; 1 if something is wrong, else what the job's submission returns."""
    options, overrides = split_options(argv, OPTIONS)
    if options & {"--help", "-h"}:
        print(USAGE)
        return 0
    environment, here = dict(os.environ), "--here" in options
    if here:
        overrides = with_allocated_nodes(overrides, environment)
    [composition] = compose_all(overrides, multirun=False)
    findings = all_findings(composition.run, environment)
    show(findings, as_json="--json" in options)
    if any(finding.state == WRONG for finding in findings):
        return 1
    if "--job" not in options:
        return 0
    probe = as_probe(composition)
    check(probe.run, here, environment)
    return start(probe, here, True, environment, PROBE)


def as_probe(composition: Composition) -> Composition:
    """The same run under a name of its own, so that it is in no run's way."""
    run = composition.run
    name = f"doctor-{run.facility.name}-{run.nodes}x{run.ranks_per_node}"
    return Composition(run.model_copy(update={"name": name}), composition.sources)


def show(findings: list[Finding], as_json: bool) -> None:
    """One line for each finding, and below it the hint of what is not ok."""
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
        return
    for finding in findings:
        print(f"{finding.state:8}{finding.subject:12}{finding.found}")
        if finding.state != OK and finding.hint:
            print(f"{'':20}→ {finding.hint}")
