"""Write the reference pages of settings, commands and code from what the package says of itself.

python setup/reference.py docs/reference        (make docs does it)
"""

import ast
import contextlib
import importlib
import inspect
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import atoll
from atoll.commands import GROUPS
from atoll.config.working_folder import source_folder
from atoll.settings import Run
from atoll.settings.federation import Campaign

# the end of a setting's name -> its unit
UNITS = {
    "_gib": "GiB",
    "_gib_s": "GiB/s",
    "_hours": "hours",
    "_minutes": "minutes",
    "_seconds": "seconds",
    "_steps": "steps",
    "_tokens": "tokens",
    "_samples": "samples",
    "_documents": "documents",
    "_bytes": "bytes",
    "_nodes": "nodes",
    "_watts": "watts",
    "_tflops": "TFLOP/s",
    "_mb": "MB",
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pages = {"settings": settings, "campaign": campaign, "commands": commands, "code": code}
    for name, write in pages.items():
        (folder / f"{name}.md").write_text(write())


def settings() -> str:
    """Those of a run, with what `hydra_conf/run.yaml` says."""
    text = (source_folder() / "hydra_conf" / "run.yaml").read_text()
    about = (
        "Of a run: `KEY=VALUE` on any command that composes. `required`: you or\na group's YAML "
    )
    about += "give it; `atoll compose` prints what came out, and from where."
    return tables(f"# Settings\n\n{about}\n", Run, "the run", text)


def campaign() -> str:
    """Those of a campaign."""
    about = "`KEY=VALUE` behind `atoll federate federation=NAME`, or lines of a federation's YAML; "
    about += "facilities are counted from 0: `sites.0.host=…`. `--dry-run` prints what came out."
    return tables(f"# Settings of a campaign\n\n{about}\n", Campaign, "the campaign", "")


def tables(title: str, root: type[BaseModel], what: str, text: str) -> str:
    """A table for each group of settings; text: the YAML that states values and remarks."""
    stated, remarks = yaml.safe_load(text) or {}, yaml_comments(text)
    parts = [title]
    for prefix, model in groups_of(root):
        about = inspect.cleandoc(model.__doc__ or "")
        parts += [f"\n## {prefix or f'Of {what} itself'}\n", f"{about}\n"]
        parts += ["| name | type | unit | default | meaning |", "|---|---|---|---|---|"]
        meanings = comments(model)
        for name, field in model.model_fields.items():
            if list(models_in(field.annotation)):
                continue
            full = f"{prefix}.{name}" if prefix else name
            meaning = meanings.get(name) or field.description or remarks.get(full, "")
            cells = [f"`{full}`", type_name(field.annotation), unit(name)]
            cells += [default(full, field, stated), meaning]
            parts.append(f"| {' | '.join(map(cell, cells))} |")
    return "\n".join(parts) + "\n"


def groups_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every group of settings, with the dotted name that leads to it."""
    yield prefix, model
    for name, field in model.model_fields.items():
        full = f"{prefix}.{name}" if prefix else name
        for inner in models_in(field.annotation):
            yield from groups_of(inner, full)
        for inner in listed(field.annotation):
            yield f"{full}[]", inner


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The groups that a setting may be; those in lists and dictionaries have names of their own."""
    if get_origin(annotation) in (Union, UnionType, Annotated):
        for part in get_args(annotation):
            yield from models_in(part)
    elif inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation


def listed(annotation: Any) -> Iterator[type[BaseModel]]:
    """The group that each entry of a list is."""
    if get_origin(annotation) is list:
        yield from models_in(get_args(annotation)[0])


def comments(model: type[BaseModel]) -> dict[str, str]:
    """What stands behind a field's line, or above it, also where it is inherited."""
    kinds = [kind for kind in reversed(model.__mro__) if kind.__module__.startswith("atoll.")]
    lines = [line for kind in kinds for line in inspect.getsource(kind).splitlines()]
    said: dict[str, str] = {}
    above: list[str] = []
    for line in lines:
        field = re.match(r"    (\w+):", line)
        comment = re.search(r"(?:^    |  )# (.*)$", line)
        if field:
            said[field[1]] = " ".join([*above, *([comment[1]] if comment else [])])
        above = [*above, comment[1]] if comment and not field else []
    return said


def yaml_comments(text: str) -> dict[str, str]:
    """Dotted name -> what stands behind its line, of a YAML with two spaces a level."""
    remarks: dict[str, str] = {}
    path: list[str] = []
    for indent, name, rest in re.findall(r"^( *)(\w+):(.*)$", text, re.M):
        path = [*path[: len(indent) // 2], name]
        _, sign, remark = rest.partition("# ")
        if sign:
            remarks[".".join(path)] = remark.strip()
    return remarks


def type_name(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is Annotated:
        return type_name(parts[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in parts)
    if origin in (Union, UnionType):
        return " or ".join(type_name(part) for part in parts)
    if origin is not None:
        return f"{origin.__name__} of {', '.join(type_name(part) for part in parts)}"
    return getattr(annotation, "__name__", str(annotation))


def unit(name: str) -> str:
    endings = [ending for ending in UNITS if name.endswith(ending)]
    return UNITS[max(endings, key=len)] if endings else ""


def default(full: str, field: Any, stated: Any) -> str:
    """What run.yaml says, else the settings."""
    for part in full.split("."):
        known = isinstance(stated, dict) and part in stated
        stated = stated[part] if known else PydanticUndefined
    value = field.get_default(call_default_factory=True) if stated is PydanticUndefined else stated
    if value is PydanticUndefined:
        return "required"
    return "null" if value is None else f"`{value}`"


def commands() -> str:
    """What each command's `--help` prints."""
    parts = ["# Commands\n\nAs `atoll COMMAND --help` prints them.\n"]
    for heading, group in GROUPS.items():
        parts.append(f"\n## {heading}\n")
        for name, (where, about) in group.items():
            parts += [f"### atoll {name}\n", f"{about}\n", f"```text\n{help_of(where)}```\n"]
    return "\n".join(parts)


def help_of(where: str) -> str:
    module, _, function = where.partition(":")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        getattr(importlib.import_module(module), function or "main")(["--help"])
    return printed.getvalue()


def code() -> str:
    """Every module's and public function's docstring, read without importing."""
    root = Path(atoll.__file__).parent
    parts = ["# Code\n\nWhat modules and their public functions and classes say of themselves.\n"]
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text())
        about = ast.get_docstring(tree)
        if about is None:
            continue
        name = ".".join(["atoll", *path.relative_to(root).with_suffix("").parts])
        parts += [f"\n## {name.removesuffix('.__init__')}\n", quoted(about)]
        for node in tree.body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name[0] == "_":
                continue
            if said := ast.get_docstring(node):
                parts.append(f"**`{signature(node)}`**\n\n{quoted(said)}")
    return "\n".join(parts) + "\n"


def signature(node: ast.FunctionDef | ast.ClassDef) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({ast.unparse(node.args)}){returns}"


def quoted(text: str) -> str:
    return f"```text\n{text}\n```\n"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
