"""Compose the configuration tree into typed runs; the only module that imports Hydra.

`atoll compose [--multirun] OVERRIDES` prints each run and where its values came from.
"""

import itertools
import json
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from atoll.commands import CommandParser
from atoll.config.binds import check_binds
from atoll.config.bundle import with_bundle
from atoll.config.certificate import origin, rates
from atoll.config.chat_templates import check_chat_template
from atoll.config.held_out import with_held_out_tail
from atoll.config.identity import derived_name
from atoll.config.image_fit import check_image_fits
from atoll.config.paths import (
    clone_around,
    with_absolute_paths,
    with_caches,
    with_image_file,
    with_put_away,
)
from atoll.config.provenance import DERIVED, annotated, changed, leaves, origins
from atoll.config.working_folder import source_folder
from atoll.errors import UserError
from atoll.plan.gguf_architectures import check_gguf
from atoll.plan.growing_positions import check_growing_positions
from atoll.plan.own_processors import as_computed_here
from atoll.plan.search import best_layout
from atoll.plan.shapes import (
    Shape,
    check_architecture,
    known_config,
    shape_of,
)
from atoll.settings import (
    Run,
    check_positions,
    check_stored_weights,
    checked,
    dumped,
    is_setting,
)
from atoll.settings.check import SAFE_LOADER
from atoll.settings.suggestions import (
    HYDRA_FLAGS,
    check_choice,
    quoted_letters,
    several_values,
    unknown_setting,
    unreadable,
)

HYDRA = (
    threading.Lock()
)  # it has one tree in a process: a campaign asks its facilities side by side
COMMAND_LINE = "command line"
AUTO = "sharding=auto"  # the planner chooses
DELETED = object()  # in place of the value of what is taken away


@dataclass(frozen=True)
class Composition:
    """A run, and where each of its values came from."""

    run: Run
    sources: dict[str, str]
    varied: str = ""  # of several runs made at once: the words in which this one differs

    def as_yaml(self) -> str:
        return annotated(dumped(self.run), self.sources)


def main(argv: list[str]) -> int:
    """Print the resolved runs, one YAML document each."""
    about = "Print the resolved run as YAML, with the source of each value beside it."
    parser = overrides_parser("compose", about, multirun=True)
    parser.add_argument("--json", action="store_true", help="as a JSON list of runs")
    arguments = parser.read(argv)
    runs = compose_all(arguments.overrides, arguments.multirun)
    if arguments.json:
        listed = [{"settings": dumped(each.run), "sources": each.sources} for each in runs]
        print(json.dumps(listed, indent=1, ensure_ascii=False))
        return 0
    heads = [f"# {line}\n" if (line := counted(runs, each)) else "" for each in runs]
    texts = [f"# {origin_line(each.run)}\n{each.as_yaml()}" for each in runs]
    print("---\n".join(head + text for head, text in zip(heads, texts, strict=True)), end="")
    return 0


def counted(runs: Sequence[Composition], composition: Composition) -> str:
    """Which of several runs this is: `2/4 sharding=ddp nodes=2`; nothing for a single one."""
    if len(runs) == 1:
        return ""
    return f"{runs.index(composition) + 1}/{len(runs)} {composition.varied}".rstrip()


def origin_line(run: Run) -> str:
    """Where the facility's figures come from."""
    return f"{run.facility.name}: {origin(run)}"


def overrides_parser(command: str, about: str, multirun: bool = False) -> CommandParser:
    """A command that takes the words of a configuration, beside options of its own."""
    parser = CommandParser(command, about, replaced=HYDRA_FLAGS)
    shown = "a setting, as nodes=8, or a choice of a group, as model=llama2_7b; what is not given "
    shown += "`atoll compose facility=NAME` prints"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=shown)
    if multirun:
        several = "take several values, as in nodes=1,2,4: one run for each combination"
        parser.add_argument("-m", "--multirun", action="store_true", help=several)
    return parser


def config_tree() -> Path:
    """The `hydra_conf` of the clone or working folder."""
    return source_folder() / "hydra_conf"


def compose_all(
    overrides: Sequence[str],
    multirun: bool,
    tree: Path | None = None,
    clone: Path | None = None,
) -> list[Composition]:
    """One composition, or with `multirun` one for each combination of values.

    clone: where relative folders of runs start, whatever the folder it is typed in.

    Raises `UserError` where two of them would share a name, and so a folder.
    """
    tree = tree or (clone / "hydra_conf" if clone else config_tree())
    lines = combinations(overrides, tree) if multirun else [list(overrides)]
    varied = [any(line[at] != word for line in lines) for at, word in enumerate(lines[0])]
    compositions = [
        replace(compose(line, tree, clone), varied=" ".join(itertools.compress(line, varied)))
        for line in lines
    ]
    seen: dict[str, list[str]] = {}
    for line, composition in zip(lines, compositions, strict=True):
        name = composition.run.name
        if name in seen:
            raise UserError(
                f"two runs have the name {name}: {' '.join(seen[name])} and {' '.join(line)}",
                "leave name out, or make it tell them apart: name='x${nodes}'",
            )
        seen[name] = line
    return compositions


def compose(
    overrides: Sequence[str], tree: Path | None = None, clone: Path | None = None
) -> Composition:
    """Compose, check and type one run.

    clone: where its relative folders start; None: the clone that this folder is in, if any. Images
    lie in a clone wherever the line is typed: else in that whose code runs.

    Raises `UserError` for any name or value that the tree or the settings do not know.
    """
    tree = tree or (clone / "hydra_conf" if clone else config_tree())
    if AUTO in overrides:
        return _planned([line for line in overrides if line != AUTO], tree, clone)
    with _hydra(tree) as loader:
        parsed, offered = _parsed(overrides, loader), groups(tree)
        lines = [_checked_line(override, offered) for override in parsed]
        config = hydra_compose("run", lines)
        values = _plain(config)
        defaults = loader.compute_defaults_list("run", lines, RunMode.RUN).defaults
    layers = _layers(tree, defaults, [one for one in parsed if one.key_or_group not in offered])
    sources = origins(layers)
    for name, _ in leaves(values):
        if not is_setting(name):
            raise unknown_setting(name, offered, f" in {sources.get(name, tree)}")
    named = values.get("name") is not None
    typed = checked(values | ({} if named else {"name": "unnamed"}))
    check_model(typed)
    start = Path.cwd()
    around = clone or clone_around(start)
    images = around or clone_around(Path(__file__)) or start
    run = with_image_file(with_absolute_paths(typed, start, around or start, images))
    run = with_put_away(with_held_out_tail(run, sources), start)
    check_chat_template(run)
    if not named:
        name = derived_name(run, _stated(tree), changed(layers, COMMAND_LINE))
        run = run.model_copy(update={"name": name})
        sources["name"] = DERIVED
    run = with_caches(with_bundle(run), os.environ)
    check_binds(run)
    check_image_fits(run)
    _check_adapter_alone(run)
    return Composition(run, sources)


def _check_adapter_alone(run: Run) -> None:
    """A campaign's, which begin from another adapter, are merged by its coordinator."""
    lora, scaling = run.model.lora, run.model.rope_scaling
    if scaling is None or lora is None or lora.start is not None or run.export.merged:
        return
    raise UserError(
        f"export.merged=false with model.rope_scaling.kind={scaling.kind}: whoever loads the "
        "adapter loads a base whose positions are not scaled",
        "export.merged=true, or give the scaled positions in the base's config.json",
    )


def path_word(name: str, path: Path) -> str:
    """`NAME=PATH` as Hydra's grammar reads it back, whatever letters are in the path."""
    escaped = str(path).replace("'", "\\'")
    return f"{name}='{escaped}'"


def check_model(run: Run) -> None:
    """Refuse what cannot be trained or divided, where this machine knows the model's shape."""
    config = known_config(run.model)
    if config is not None and run.model.source is not None:
        check_stored_weights(run.model.source, config.get("quantization_config"))
    if config is not None and "model_type" in config:
        shape = shape_of(config)
        scaling = run.model.rope_scaling
        factor = 1.0 if scaling is None else scaling.factor
        check_positions(int(shape.positions * factor), run.data.sequence_tokens)
        check_architecture(shape, run.sharding)
        check_growing_positions(config, run)
        check_gguf(run, config)


def campaign_values(overrides: Sequence[str], tree: Path | None = None) -> dict[str, Any]:
    """The plain settings of a campaign, from campaign.yaml and a federation's file."""
    tree = tree or config_tree()
    with _hydra(tree) as loader:
        lines = []
        for override in _parsed(overrides, loader):
            text, key = str(override.input_line).lstrip("+"), override.key_or_group
            if re.match(r"sites\.(?!\d)", key):
                raise UserError(
                    f"{key}: the facilities are a list, without names",
                    f"count them from 0, as sites.0{key[key.find('.', 6) :]}, or change the YAML",
                )
            if key == "federation":
                check_choice(key, override.value(), groups(tree)[key])
            lines.append(text if key == "federation" else f"++{text}")
        return _plain(hydra_compose("campaign", lines))


def settings_of(
    overrides: Sequence[str], tree: Path | None = None
) -> Iterator[tuple[str, Any, bool]]:
    """Of each word the setting, its value, and whether it is a plain choice of a group.

    The value of what a word takes away is DELETED, whatever it says.
    """
    tree = tree or config_tree()
    with _hydra(tree) as loader:
        parsed = _parsed(overrides, loader)
    offered = groups(tree)
    for override in parsed:
        name, value = override.key_or_group, override.value()
        if override.is_delete():
            yield name, DELETED, False
            continue
        choices = [*offered.get(name, []), *(["auto"] if f"{name}=auto" == AUTO else [])]
        plain = isinstance(value, str) and override.package is None
        yield name, value, plain and value in choices


def shardings(tree: Path) -> dict[str, dict[str, Any]]:
    """Name -> the content of each sharding's YAML."""
    files = sorted((tree / "sharding").glob("*.yaml"))
    return {file.stem: _content(file) for file in files}


def known_shape(run: Run) -> Shape:
    """The shape of a run's model.

    Raises `UserError` where this machine has no configuration of it.
    """
    config = known_config(run.model)
    if config is None:
        raise UserError(
            f"the shape of {run.model.source} is not known here",
            "give model.source as a folder, or model.config.model_type and its sizes",
        )
    return shape_of(config)


def _planned(overrides: list[str], tree: Path, clone: Path | None) -> Composition:
    """The run with the strategy that the planner chooses for it."""
    run = as_computed_here(compose(overrides, tree, clone).run)
    best = best_layout(run, known_shape(run), shardings(tree), rates(run), overrides)
    return compose([*overrides, *best.overrides], tree, clone)


def combinations(overrides: Sequence[str], tree: Path) -> list[list[str]]:
    """Every combination of the values that Hydra's sweep grammar gives."""
    with _hydra(tree) as loader:
        parsed = _parsed(overrides, loader)
        choices = [_values(override) for override in parsed]
    return [list(line) for line in itertools.product(*choices)]


def groups(tree: Path) -> dict[str, list[str]]:
    """Group -> the choices it offers."""
    folders = [path for path in sorted(tree.iterdir()) if path.is_dir()]
    return {path.name: sorted(file.stem for file in path.glob("*.yaml")) for path in folders}


def _stated(tree: Path) -> dict[str, Any]:
    """What run.yaml itself says, without the groups."""
    values = _content(tree / "run.yaml")
    return {name: value for name, value in values.items() if name != "defaults"}


def _content(file: Path) -> dict[str, Any]:
    """A file of the tree, as YAML alone has it."""
    values: dict[str, Any] = yaml.load(file.read_text(), SAFE_LOADER) or {}
    return values


def _plain(config: DictConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


@contextmanager
def _hydra(tree: Path) -> Iterator[ConfigLoader]:
    try:
        with HYDRA, initialize_config_dir(str(tree), version_base="1.3"):
            yield GlobalHydra.instance().config_loader()
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise _explained(error, tree) from None


def _parsed(lines: Sequence[str], loader: ConfigLoader) -> list[Override]:
    parser, parsed = OverridesParser.create(loader), []
    for line in lines:
        try:
            [override] = parser.parse_overrides([quoted_letters(line)])
        except HydraException:
            raise unreadable(line) from None
        parsed.append(override)
    return parsed


def _values(override: Override) -> list[str]:
    """The override once for each of its values."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    discrete = override.is_discrete_sweep()
    values = list(override.sweep_string_iterator()) if discrete else []
    if not values:
        key = override.key_or_group
        raise UserError(
            f"no values to take in turn: {override.input_line}",
            f"list them: {key}=A,B or {key}=range(1,4)",
        )
    return [f"{override.get_key_element()}={value}" for value in values]


def _checked_line(override: Override, offered: dict[str, list[str]]) -> str:
    """The override as Hydra should see it: a known setting may be given without `+`."""
    key = override.key_or_group
    line = str(override.input_line).lstrip("+")
    if override.is_sweep_override():
        raise several_values(key, line.partition("=")[2])
    if key in offered:
        if not override.is_delete():
            check_choice(key, override.value(), offered[key])
        return line
    if not is_setting(key):
        raise unknown_setting(key, offered)
    return line if override.is_delete() else f"++{line}"


def _layers(
    tree: Path, defaults: Sequence[Any], typed: Sequence[Override]
) -> list[tuple[str, dict[str, Any]]]:
    """What each file, then each setting typed, says: (source, values)."""
    layers = []
    for part in defaults:
        file = tree / f"{part.config_path}.yaml"
        if file.is_file():
            values = _content(file)
            values.pop("defaults", None)
            layers.append((str(file.relative_to(tree.parent)), _nested(part.package, values)))
    for override in typed:
        if not override.is_delete():
            layers.append((COMMAND_LINE, _nested(override.key_or_group, override.value())))
    return layers


def _nested(dotted: str, value: Any) -> dict[str, Any]:
    for part in reversed([part for part in dotted.split(".") if part]):
        value = {part: value}
    return dict(value)


def _explained(error: Exception, tree: Path) -> UserError:
    """What Hydra, OmegaConf or YAML found, in two lines."""
    text = str(error.__cause__ or error)
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    if ungiven := re.match(r"You must specify '(\w+)'", first):
        group = ungiven[1]
        choices = " | ".join(groups(tree)[group])
        return UserError(f"no {group} is chosen", f"choose one: {group}={choices}")
    if isinstance(error, MissingMandatoryValue):
        return UserError(f"setting missing: {error.full_key}", f"set it: {error.full_key}=VALUE")
    if isinstance(error, InterpolationResolutionError):
        return UserError(f"{error.full_key}: {first}", f"fix what {error.full_key} refers to")
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        where = f"{mark.name}, line {mark.line + 1}"
        return UserError(f"{where}: {error.problem}", "fix the YAML there")
    return UserError(first, "fix the override or the file of the configuration tree it names")
