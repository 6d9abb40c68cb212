"""Every setting of a run, typed, with its unit in its name.

The values live in `hydra_conf/`; here is what they may be. A run is read back from its
`run.yaml` by `load_run`, without Hydra, on every rank.
"""

from atoll.settings.check import (
    RENAMED_SETTINGS,
    checked,
    dumped,
    is_setting,
    is_text,
    load_run,
    nearest_setting,
    setting_names,
)
from atoll.settings.data import Classes, Data, Source, Validation
from atoll.settings.learning import (
    Evaluation,
    Generation,
    Lora,
    Model,
    Mup,
    Optimizer,
    ParameterGroup,
    Precision,
    RopeScaling,
    Task,
    Tokenizer,
    Training,
    check_positions,
    check_stored_weights,
)
from atoll.settings.machine import Facility, Folders, Image, Launcher, Limits, Node, Queue
from atoll.settings.run import Run
from atoll.settings.sharding import Sharding

__all__ = [
    "RENAMED_SETTINGS",
    "Classes",
    "Data",
    "Evaluation",
    "Facility",
    "Folders",
    "Generation",
    "Image",
    "Launcher",
    "Limits",
    "Lora",
    "Model",
    "Mup",
    "Node",
    "Optimizer",
    "ParameterGroup",
    "Precision",
    "Queue",
    "RopeScaling",
    "Run",
    "Sharding",
    "Source",
    "Task",
    "Tokenizer",
    "Training",
    "Validation",
    "check_positions",
    "check_stored_weights",
    "checked",
    "dumped",
    "is_setting",
    "is_text",
    "load_run",
    "nearest_setting",
    "setting_names",
]
