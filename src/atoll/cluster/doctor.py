"""`atoll doctor`: is this facility ready, and with --job, are its devices and links as stated."""

import json
import os
from dataclasses import asdict

from atoll.cluster.facility_checks import OK, WRONG, Finding, all_findings
from atoll.cluster.start import start
from atoll.cluster.submit import with_allocated_nodes
from atoll.cluster.submit_checks import check
from atoll.commands import CommandParser
from atoll.config.binds import bound
from atoll.config.compose import COMMAND_LINE, Composition, compose, overrides_parser
from atoll.tables import table

PROBE_MINUTES = 15
PROBE_NOTICE_SECONDS = 30  # it has nothing to save
PROBE = "atoll.monitor.node_probe:main"
ABOUT = """\
Ask of a facility, on its login node, all that a run will need, and say how to fix what is wrong."""


def main(argv: list[str]) -> int:
    """Print the findings; 1 if something is wrong, else what the job's submission returns."""
    arguments = _parser().read(argv)
    environment, overrides = dict(os.environ), arguments.overrides
    if arguments.here:
        overrides = with_allocated_nodes(overrides, environment)
    composition = compose(overrides)
    findings = all_findings(composition.run, environment)
    show(findings, arguments.json)
    if any(finding.state == WRONG for finding in findings):
        return 1
    if not arguments.job:
        return 0
    probe = as_probe(composition)
    check(probe.run, arguments.here, environment)
    probe.run.folders.facilities.mkdir(parents=True, exist_ok=True)
    return start(probe, arguments.here, True, environment, PROBE)


def _parser() -> CommandParser:
    parser = overrides_parser("doctor", ABOUT)
    job = "then queue a job whose ranks report devices, bindings, links and their bandwidth"
    here = "with --job: run it in this allocation; without a scheduler it runs here anyway"
    parser.add_argument("--job", action="store_true", help=job)
    parser.add_argument("--here", action="store_true", help=here)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


def as_probe(composition: Composition) -> Composition:
    """The same run under a name of its own, so that it is in no run's way; and a short one.

    Its time is the facility's only where it was typed: a job of a day waits long.
    """
    run = composition.run
    name = f"doctor-{run.facility.name}-{run.nodes}x{run.ranks_per_node}"
    certificates = bound(str(run.folders.facilities), run)
    binds = [*run.facility.binds, *certificates.values()]
    minutes = run.facility.walltime_minutes
    is_typed = composition.sources.get("facility.walltime_minutes") == COMMAND_LINE
    if minutes is not None and not is_typed:
        minutes = min(minutes, PROBE_MINUTES)
    facility = run.facility.model_copy(update={"binds": binds, "walltime_minutes": minutes})
    restart = run.restart.model_copy(update={"notice_seconds": PROBE_NOTICE_SECONDS})
    update = {"name": name, "facility": facility, "restart": restart}
    return Composition(run.model_copy(update=update), composition.sources)


def show(findings: list[Finding], as_json: bool) -> None:
    """One line for each finding, and below it the hint of what is not ok."""
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
        return
    rows = []
    for finding in findings:
        rows.append([finding.state, finding.subject, finding.found])
        if finding.state != OK and finding.hint:
            rows.append(["", "", f"→ {finding.hint}"])
    print(table(["", "", ""], rows))
