"""MLflow's store of all runs of a folder: plain files, one experiment, each run once.

Files, since many jobs write at once to a file system of a cluster, where a database of one file
is not safe, and since that needs no library of a database.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.settings import Run, dumped

EXPERIMENT = "atoll"
MOST_LETTERS, MOST_AT_ONCE = 6000, 100  # MLflow's limits: of a value, of values in a call


def opened_run(run: Run, run_folder: Path, is_new: bool) -> tuple[Any, str]:
    """MLflow's client, and the id of this run in the store; a new one leaves the trash to MLflow.

    The id is kept in the run's folder, so that a run that resumes finds its own.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    store, file = run_dir.mlflow(run_folder).absolute(), run_dir.mlflow_run_file(run_folder)
    if not store.exists():
        _make(store)
    client = MlflowClient(tracking_uri=store.as_uri())
    earlier = file.read_text().strip() if file.is_file() else ""
    with suppress(MlflowException):  # a person removed the store
        if earlier and is_new:
            client.delete_run(earlier)
        elif earlier and client.get_run(earlier).info.lifecycle_stage == "active":
            return client, earlier  # else a person deleted it
    run_id = _new_run(client, run)
    run_dir.write_whole(file, run_id + "\n")
    return client, run_id


def _make(store: Path) -> None:
    """The store with its experiment, by a rename: of runs that begin together one makes it."""
    from mlflow.tracking import MlflowClient

    partial = store.with_name(f".{store.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    store.parent.mkdir(parents=True, exist_ok=True)
    MlflowClient(tracking_uri=partial.as_uri()).create_experiment(EXPERIMENT)
    for file in partial.glob("*/meta.yaml"):
        file.write_text(file.read_text().replace(partial.as_uri(), store.as_uri()))
    try:
        partial.rename(store)
    except OSError:  # another run was first
        if not store.is_dir():
            raise
        shutil.rmtree(partial)


def _new_run(client: Any, run: Run) -> str:
    from mlflow.entities import Param

    experiment = client.get_experiment_by_name(EXPERIMENT)
    created = client.create_run(experiment.experiment_id, run_name=run.name)
    params = [
        Param(re.sub(r"[^\w\-. /]", "_", name), text[:MOST_LETTERS])
        for name, text in leaves(dumped(run))
    ]
    for first in range(0, len(params), MOST_AT_ONCE):
        client.log_batch(created.info.run_id, params=params[first : first + MOST_AT_ONCE])
    return str(created.info.run_id)


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each setting that has a value: its dotted name, and the value as text."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        elif value is not None:
            yield prefix + name, value if isinstance(value, str) else json.dumps(value)
