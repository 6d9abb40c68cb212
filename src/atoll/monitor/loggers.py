"""Where a run's figures also go: TensorBoard, Weights & Biases, MLflow, in folders beside it.

metrics.jsonl comes first and holds everything; a logger gets the numbers of its lines. All of them
write files and nothing else: what they would send, collect or ask for of themselves is turned off.
"""

import importlib.util
import json
import math
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll import run_dir
from atoll.errors import UserError
from atoll.launch.preload import environment
from atoll.monitor.mlflow_store import leaves, opened_run
from atoll.monitor.observers import Record, Write
from atoll.settings import Run, dumped

# event -> what its figures are filed under
FILED_UNDER = {
    "prediction": "predicted",
    "train": "train",
    "evaluation": "held_out",
    "energy": "energy",
}
JUDGED_BY = ("held_out/loss", "train/loss", "train/tokens_per_second")
# The report's figures, as TensorBoard's custom scalars: heading -> chart -> figures.
CHARTS = {
    "Report": {
        title: ["Multiline", names]
        for title, names in {
            "Loss": ["train/loss", "held_out/loss"],
            "Perplexity": ["train/perplexity", "held_out/perplexity"],
            "Throughput": ["train/tokens_per_second"],
            "Model FLOP utilisation": ["train/mfu"],
            "Memory of a rank": ["train/memory_gib"],
        }.items()
    }
}
PLACES = ("step", "first_step", "time")  # numbers of a record that are no figures


@dataclass(frozen=True)
class Logger:
    """An open logger: how a record is logged, and how it is closed (True: the run has failed)."""

    log: Write
    close: Callable[[bool], None]


@dataclass(frozen=True)
class Start:
    """What a logger is opened with: the run, and how far it is."""

    run: Run
    folder: Path
    step: int  # of the checkpoint it goes on from, where metrics.jsonl now ends; 0: it begins


def ignore(record: Record) -> None:
    """What a rank does with a record that has no loggers."""


def check_installed(names: list[str]) -> None:
    """Raises `UserError` if the library of a logger is not there."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a mere folder of this name is no library
            raise UserError(
                f"loggers={name}: its library is not installed where the ranks run",
                "make setup installs it there (a wheel: pip install 'WHEEL[loggers]'), or leave "
                f"{name} out of loggers=",
            )


@contextmanager
def opened(start: Start) -> Iterator[Write]:
    """All loggers of a run as one function; closed however the `with` ends.

    A run that begins, begins them anew. Raises `UserError` for a logger that cannot be opened; one
    that fails later is left, and the run goes on without it.
    """
    loggers: dict[str, Logger] = {}
    failed = True
    with environment(_variables(start.folder)):
        try:
            if start.step == 0:
                _forget(start.folder)
            for wanted in start.run.loggers:
                if wanted not in loggers:
                    loggers[wanted] = _open(wanted, start)
            yield _log_to_all(loggers)
            failed = False
        finally:
            for name, logger in loggers.items():
                _close(name, logger, failed)


def figures(record: Record) -> dict[str, float]:
    """The finite numbers of a record, by the name they have in a logger."""
    return {
        f"{FILED_UNDER[record['event']]}/{name}": float(value)
        for name, value in record.items()
        if name not in PLACES and isinstance(value, int | float) and math.isfinite(value)
    }


def tensorboard(start: Start) -> Logger:
    """Event files; those of a run that resumes hide what came after its checkpoint."""
    from torch.utils.tensorboard import SummaryWriter

    purge = start.step + 1 if start.step else None
    writer = SummaryWriter(str(run_dir.tensorboard(start.folder)), purge_step=purge)
    if start.step == 0:
        writer.add_text("settings", f"```json\n{json.dumps(dumped(start.run), indent=1)}\n```")
        for summary in _hparams(start.run):
            writer._get_file_writer().add_summary(summary)
        writer.add_custom_scalars(CHARTS)

    def log(record: Record) -> None:
        for name, value in figures(record).items():
            writer.add_scalar(name, value, record["step"])
        writer.flush()

    return Logger(log, lambda failed: writer.close())


def _hparams(run: Run) -> Iterator[Any]:
    """TensorBoard's table of settings: what the session's values are, and what it is judged by."""
    from torch.utils.tensorboard.summary import hparams

    experiment, session, _ = hparams(dict(leaves(dumped(run))), dict.fromkeys(JUDGED_BY, 0.0))
    yield from (experiment, session)


def add_samples(run: Run, run_folder: Path, step: int, texts: Mapping[str, str]) -> None:
    """Texts that a model wrote, by name, into the event files of a run that has them."""
    if "tensorboard" not in run.loggers:
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(run_dir.tensorboard(run_folder))) as writer:
        for name, text in texts.items():
            writer.add_text(f"sample/{name}", f"```\n{text}\n```", step)


# Of a run its figures and settings alone: no code, packages, host, console or git.
WANDB_SETTINGS: dict[str, Any] = {
    "mode": "offline",
    "project": "atoll",
    "program": "atoll",
    "console": "off",
    "silent": True,
    "save_code": False,
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
}


def wandb(start: Start) -> Logger:
    """An offline run. A resume logs all again to a new one under the same id, and drops the old.

    A kill loses what W&B has not yet written, and a file once written cannot be cut.
    """
    import wandb as library

    earlier = sorted(run_dir.wandb(start.folder).glob("offline-run-*"))  # offline-run-DATE-ID
    run_id = earlier[0].name.split("-", 3)[3] if earlier else secrets.token_hex(4)
    names = {"root_dir": str(start.folder), "run_id": run_id, "run_name": start.run.name}
    settings = library.Settings(**WANDB_SETTINGS, **names)
    session = library.init(settings=settings, config=dumped(start.run))

    def log(record: Record) -> None:
        when = {"_timestamp": record.get("time", time.time())}
        session.log(figures(record) | when, step=record["step"])

    def close(failed: bool) -> None:
        session.finish(exit_code=int(failed))
        library.teardown()  # the process that writes for it

    for record in run_dir.metrics(start.folder) if start.step else []:
        if record["event"] in FILED_UNDER:
            log(record)
    for folder in earlier:
        shutil.rmtree(folder)
    return Logger(log, close)


def mlflow(start: Start) -> Logger:
    """One run in the store that all runs of a folder share.

    It forgets nothing, so what a killed start logged stays, and is not logged again.
    """
    from mlflow.entities import Metric

    client, run_id = opened_run(start.run, start.folder, start.step == 0)
    client.update_run(run_id, status="RUNNING")
    stored = {
        (name, metric.step)
        for name in client.get_run(run_id).data.metrics
        for metric in client.get_metric_history(run_id, name)
    }

    def log(record: Record) -> None:
        now, step = int(time.time() * 1000), record["step"]
        named = {_in_store(name): x for name, x in figures(record).items()}
        new = {name: x for name, x in named.items() if (name, step) not in stored}
        client.log_batch(run_id, [Metric(name, x, now, step) for name, x in new.items()])

    def close(failed: bool) -> None:
        client.set_terminated(run_id, "FAILED" if failed else "FINISHED")

    return Logger(log, close)


def _in_store(name: str) -> str:
    """A file of its own: `loss/NAME` would be in a folder where the file `loss` is."""
    group, _, figure = name.partition("/")
    plain = re.sub(r"[^\w\-. :]", "_", figure)
    return f"{group}/{plain}"


LOGGERS: dict[str, Callable[[Start], Logger]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "mlflow": mlflow,
}


def _log_to_all(loggers: dict[str, Logger]) -> Write:
    """Logs to all; one that fails is left out from then on, for the training matters more."""
    working = dict(loggers)

    def log(record: Record) -> None:
        for name in list(working) if record["event"] in FILED_UNDER else []:
            try:
                working[name].log(record)
            except Exception as error:
                del working[name]
                print(f"logger {name} is left: {error!r}; metrics.jsonl goes on", flush=True)

    return log


def _open(name: str, start: Start) -> Logger:
    try:
        return LOGGERS[name](start)
    except Exception as error:
        raise UserError(
            f"logger {name} cannot be opened: {error!r}".replace("\n", " "),
            f"fix what it says, or leave {name} out of loggers=",
        ) from error


def _close(name: str, logger: Logger, failed: bool) -> None:
    try:
        logger.close(failed)
    except Exception as error:
        print(f"logger {name} was not closed well: {error!r}", flush=True)


def _forget(run_folder: Path) -> None:
    """A run that begins again writes its metrics.jsonl anew, and so its loggers."""
    for path in (run_dir.tensorboard, run_dir.wandb):
        shutil.rmtree(path(run_folder), ignore_errors=True)


def _variables(run_folder: Path) -> dict[str, str]:
    """What only variables can set in the libraries, before they are imported."""
    return {
        "WANDB_ERROR_REPORTING": "false",  # errors are sent to nobody
        "WANDB_CACHE_DIR": str(run_dir.wandb(run_folder) / "cache"),  # not in a home
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
