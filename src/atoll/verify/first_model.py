"""The model that a campaign begins with: nothing but weights, and what is stated beside them."""

import json
from pathlib import Path

from atoll.proof.statement import SCORES
from atoll.verify.export import files_in
from atoll.verify.lines import differs

PARTS = {"master", "export", "manifest.json"}
WORDS = {"digest", "master", "frozen", "answers", "round"}  # of its manifest: nothing was before it


def refuse_more_than_first(model: Path, stated: set[str]) -> None:
    """Raise `UserError` for what the first round would read beside the weights, or a loader.

    stated: the names of the campaign's files in the statement.
    """
    manifest = json.loads((model / "manifest.json").read_text())
    for word in sorted(manifest.keys() - WORDS):
        raise differs(f"{model / 'manifest.json'} says {word}, which no first model has")
    for path in sorted(model.iterdir()):
        if path.name not in PARTS:
            raise differs(f"{path} is no part of a first model")
    folder, masters = model.parents[1], manifest["master"].keys()
    for path in files_in(model / "master"):
        if path.relative_to(model / "master").as_posix() not in masters:
            raise differs(f"{path} is no part of a first model")
    for path in files_in(model / "export") if (model / "export").is_dir() else []:
        name = path.relative_to(model / "export").as_posix()
        own = (*masters, SCORES)
        if name not in own and path.relative_to(folder).as_posix() not in stated:
            raise differs(f"{path} is no part of a first model: nothing states it")
