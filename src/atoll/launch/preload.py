"""Import once, before the ranks of a node are forked: what a rank would import, and no thread."""

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from atoll.errors import UserError
from atoll.imports import paused_garbage_collection

# What a training rank imports, also late in its life; a module missing here is read by each rank.
PRELOADED_MODULES = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.opt.modeling_opt",
    "transformers.models.bert.modeling_bert",
)
_WHILE_IMPORTING = {
    # numpy's BLAS starts its pool when it is loaded, and threads do not survive a fork.
    "OPENBLAS_NUM_THREADS": "1",
    # A look for devices while importing asks the management library and not the driver, which
    # would be of no use in a forked process any more.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
# Open in a process once its driver runs: CUDA, ROCm, Level Zero.
_DEVICE_FILES = ("/dev/nvidia-uvm", "/dev/kfd", "/dev/dri/")
# jemalloc's own, of an image or a facility that preloads it: it stops before a fork and is not in
# the child (background_thread.c, "postfork_child")
_STOPS_BEFORE_A_FORK = "jemalloc_bg_thd"
_INSTEAD = "use launcher=static, where each rank imports for itself"


def preload(import_entrypoint: Callable[[], ModuleType]) -> ModuleType:
    """Import torch, transformers and the entrypoint's module, fit to be forked; return the latter.

    Raises UserError where an import started a thread or touched a device.
    """
    with environment(_WHILE_IMPORTING), paused_garbage_collection():
        for name in PRELOADED_MODULES:
            importlib.import_module(name)
        module = import_entrypoint()
    refuse_threads()
    refuse_open_devices()
    return module


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """These variables for the length of a `with`; what was there before is there again after it."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def refuse_threads() -> None:
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    names = [name for name in names if name != _STOPS_BEFORE_A_FORK]
    if len(names) > 1:
        raise UserError(
            f"{len(names)} threads run after the imports ({', '.join(sorted(names))}); "
            "ranks are forked from one thread",
            _INSTEAD,
        )


def refuse_open_devices() -> None:
    opened = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            opened.add(str(path.readlink()))
    touched = sorted(name for name in opened if name.startswith(_DEVICE_FILES))
    if touched:
        raise UserError(f"the imports opened {', '.join(touched)} before the fork", _INSTEAD)
