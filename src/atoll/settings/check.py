"""Plain values to a checked run, in two lines where they are wrong; and the names of settings."""

import difflib
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from atoll.errors import UserError
from atoll.settings.fields import WORD_PATTERN
from atoll.settings.run import Run

# what a setting was called before -> its name
RENAMED_SETTINGS = {
    "sinks": "loggers",
    "training.recompute": "training.activation_checkpointing",
    "training.samples_before": "training.consumed_samples",
}

REWRITE = "repair it, or delete it and submit the run's line again, which writes it"
# libyaml's, eight times faster, where PyYAML was built with it
SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DEEPEST = 40  # settings within settings
SHORT = reprlib.Repr()  # of a value that somebody else wrote
SHORT.maxlevel, SHORT.maxlist, SHORT.maxdict, SHORT.maxtuple = 4, 20, 20, 20
SHORT.maxstring = SHORT.maxother = SHORT.maxlong = 400
# groups that the run.yaml of an older run has not
ADDED_GROUPS = {"monitor": {"communication": True, "energy": True, "progress": True}}


def checked(values: Mapping[str, Any]) -> Run:
    """Turn plain values into a `Run`.

    Raises `UserError` naming the first setting that is unknown, missing or out of range.
    """
    try:
        return Run.model_validate(values)
    except ValidationError as error:
        raise _explained(error) from None


def dumped(run: Run) -> dict[str, Any]:
    """The run as plain JSON values, ready for YAML."""
    return run.model_dump(mode="json")


def load_run(path: Path) -> Run:
    """Read a `run.yaml` written by `atoll compose` or `atoll submit`."""
    try:
        text = path.read_text()
        _refuse_more_than_plain(path, text)
        values = yaml.load(text, SAFE_LOADER)
    except FileNotFoundError:
        raise UserError(
            f"no run at {path.parent}: run.yaml is missing",
            "give the folder of a run; sbatch/train.sbatch makes one",
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = "" if where is None else f", line {where.line + 1}"
        raise UserError(
            f"{path}{line}: not YAML: {getattr(error, 'problem', None) or 'not text'}", REWRITE
        ) from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no settings", REWRITE)
    return checked(ADDED_GROUPS | values)


def _refuse_more_than_plain(path: Path, text: str) -> None:
    """Names for what was said before, and lists in lists, may be all of a machine's memory."""
    depth = 0
    for event in yaml.parse(text, SAFE_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        named = getattr(event, "anchor", None)
        if named or depth > DEEPEST:
            what = f"the anchor {named}" if named else f"lists in lists, more than {DEEPEST}"
            mark = event.start_mark
            line = "" if mark is None else f", line {mark.line + 1}"
            raise UserError(f"{path}{line}: {what[:80]}", REWRITE)


def setting_names(model: type[BaseModel] = Run, prefix: str = "") -> Iterator[str]:
    """Every dotted name a run knows, for "did you mean" and for documentation."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for inner in _models_in(field.annotation):
            yield from setting_names(inner, f"{prefix}{name}.")


def is_setting(name: str) -> bool:
    """Whether a run knows this dotted name; free-form groups know every name below them."""
    return _annotation(name) is not None


def is_text(name: str) -> bool:
    """Whether this setting takes any text."""
    annotation = _annotation(name)
    return annotation is str or str in get_args(annotation)


def _annotation(name: str) -> Any:
    """The type of a setting; None if there is none of this name."""
    annotation: Any = Run
    for part in name.split("."):
        if get_origin(annotation) is dict:
            return Any
        fields = [m.model_fields[part] for m in _models_in(annotation) if part in m.model_fields]
        if not fields:
            return None
        annotation = fields[0].annotation
    return annotation


def nearest_setting(name: str) -> str | None:
    """The known setting whose dotted name, or last word, is most like `name`."""
    known = list(setting_names())
    last_words: dict[str, str] = {}
    for full in known:
        last_words.setdefault(full.rsplit(".", 1)[-1], full)
    whole = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if whole:
        return whole[0]
    last = difflib.get_close_matches(name.rsplit(".", 1)[-1], last_words, n=1, cutoff=0.7)
    return last_words[last[0]] if last else None


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if get_origin(annotation) in (Union, UnionType):
        return [m for part in get_args(annotation) for m in _models_in(part)]
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return [annotation] if is_model else []


def _explained(error: ValidationError) -> UserError:
    # an old name before the new one that is missing for it
    first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    name = ".".join(str(part) for part in first["loc"])
    kind = first["type"]
    if kind == "extra_forbidden":
        if name in RENAMED_SETTINGS:
            return UserError(
                f"unknown setting: {name}", f"it is called {RENAMED_SETTINGS[name]} now"
            )
        near = nearest_setting(name)
        hint = f"did you mean {near}?" if near else "`atoll compose` lists every setting"
        return UserError(f"unknown setting: {name}", hint)
    if kind == "missing":
        return UserError(f"setting missing: {name}", f"set it: {name}=VALUE")
    if kind == "value_error":
        found, *hint = first["ctx"]["error"].args
        return UserError(found, *(hint or ["change one of the named settings so that they agree"]))
    found = f"{name} = {SHORT.repr(first['input'])}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return UserError(found, _hint(_as_typed(name), first))


def _as_typed(name: str) -> str:
    """An element of a list has no name that could be typed: `loggers.0` is of loggers."""
    group, _, last = name.rpartition(".")
    return group if last.isdecimal() else name


def _hint(name: str, first: Any) -> str:
    if first["type"] == "string_type" and isinstance(first["input"], int | float):
        return f"quote it, so that it stays text: \"{name}='{first['input']}'\""
    if first.get("ctx", {}).get("pattern") == WORD_PATTERN:
        return "letters a to z, digits, '.', '-' and '_', the first a letter or a digit"
    choices = first.get("ctx", {}).get("expected")
    if not isinstance(choices, str):
        return f"give {name} another value"
    words = [word.strip("' ") for word in choices.replace(" or ", ", ").split(",")]
    near = difflib.get_close_matches(str(first["input"]), words, n=1)
    return f"did you mean {name}={near[0]}?" if near else f"choose {name} from: {', '.join(words)}"
