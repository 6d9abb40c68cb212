"""`atoll aggregate`: the next global model from updates whose senders are known."""

import argparse
import json
import resource
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from atoll.commands import CommandParser, json_object
from atoll.federation.freed_memory import keep_freed_memory
from atoll.federation.update_files import read_verified, reason_of
from atoll.imports import paused_garbage_collection
from atoll.one_writer import one_writer
from atoll.settings.exchange import Codec, UpdateManifest
from atoll.settings.federation import Rule, checked_settings

THREADS = 2
IMPORTING_SECONDS = 0.0002


def main(argv: list[str]) -> int:
    """`atoll aggregate`: the next global model from updates whose senders are known."""
    arguments = _read(argv)
    rule = checked_settings(Rule, arguments.rule, "rule.", "see settings/federation.py")
    folders = [] if arguments.hold else arguments.updates
    with ThreadPoolExecutor(THREADS) as pool:
        verifying = [(folder, pool.submit(read_verified, folder)) for folder in folders]
        return _aggregate(arguments, rule, verifying)


def _aggregate(
    arguments: argparse.Namespace, rule: Rule, verifying: list[tuple[Path, Future[UpdateManifest]]]
) -> int:
    keep_freed_memory()
    usual = sys.getswitchinterval()
    sys.setswitchinterval(IMPORTING_SECONDS)  # an import lets threads that hash wait for this long
    with paused_garbage_collection():
        import torch

        from atoll.federation.aggregate import aggregate, from_base, hold
        from atoll.federation.cohort import SmallCohort
        from atoll.federation.global_model import read_global
    sys.setswitchinterval(usual)
    torch.set_num_threads(1)  # stretches are worked on side by side
    bases = [read_global(arguments.base)["digest"], *arguments.older]
    updates, unreadable = [], dict[str, str]()
    about = {"unreadable": unreadable} | arguments.about
    how = (bases, rule.overlap_rounds, about.get("round"))
    for folder, manifest in verifying:
        try:
            updates.append(from_base(manifest.result(), folder, *how))
        except Exception as error:  # whatever one facility sent, the others go on
            unreadable[folder.parent.name] = reason_of(error)
    _allow_many_files()
    base, codec, out = arguments.base, arguments.codec, arguments.out
    try:
        with one_writer(out):
            if arguments.hold:
                outcome = hold(base, rule, codec, out, about)
            else:
                outcome = aggregate(base, updates, rule, codec, out, about)
    except SmallCohort as error:
        facts = {"short": error.found, "rejected": error.rejected, "unreadable": unreadable}
        rounds = {one.facility: one.manifest.round for one in updates}
        refused = {name: rounds[name] for name in error.rejected}
        print(json.dumps(facts | {"refused_rounds": refused, "too_late": error.too_late}))
        return 0
    print(json.dumps(asdict(outcome) | {"unreadable": unreadable}))
    return 0


def _read(argv: list[str]) -> argparse.Namespace:
    parser = CommandParser("aggregate", main.__doc__)
    parser.add_argument("updates", nargs="*", type=Path)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--older", action="append", default=[], help="digest of the model before")
    parser.add_argument("--out", type=Path, required=True)
    rule = "JSON: weigh, combine, update and the rest"
    parser.add_argument("--rule", type=json_object, default={}, help=rule)
    parser.add_argument("--codec", default="fp32", choices=get_args(Codec), help="of the delta")
    about = "JSON: kept in the manifest"
    parser.add_argument("--about", type=json_object, default={}, help=about)
    parser.add_argument("--hold", action="store_true", help="of no update: the model stays")
    return parser.read(argv)


def _allow_many_files() -> None:
    """Every file of every update is open at once: more than the usual 1,024 with large models."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
