"""The code of a model's or tokenizer's folder is never run, whatever anybody answers."""

import ast
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from atoll.errors import UserError
from atoll.launch import command as launch

PACKAGE = Path(__file__).parents[2] / "src" / "atoll"
LOADERS = {"from_pretrained", "from_config"}
PYTHON_OF_PEFT = {"PeftModel"}  # it reads adapters' files alone
CODE = """
import json, sys
from pathlib import Path
from atoll.errors import UserError
from atoll.models.source import load_config
from atoll.settings import Model
try:
    load_config(Model(name="x", source=sys.argv[1], config=json.loads(sys.argv[2])), {})
except UserError as error:
    print(error.found)
"""


def calls() -> list[tuple[str, str, ast.Call]]:
    every = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value)
                if node.func.attr in LOADERS and owner not in PYTHON_OF_PEFT:
                    every.append((f"{path.name}:{node.lineno}", owner, node))
    return every


def test_every_loader_is_told_to_run_no_code() -> None:
    assert len(calls()) >= 8
    for place, _, call in calls():
        words = {word.arg: ast.unparse(word.value) for word in call.keywords}
        plain = words.get(None) in ("PLAIN", "overrides")
        assert plain or words.get("trust_remote_code") == "False", place


@pytest.mark.parametrize("config", [{}, {"trust_remote_code": True}])
def test_a_models_code_is_not_run_and_nobody_is_asked(tmp_path: Path, config: object) -> None:
    hit = tmp_path / "hit"
    (tmp_path / "evil.py").write_text(f"open({str(hit)!r}, 'w')\n")
    about = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(about))
    argv = [sys.executable, "-c", CODE, str(tmp_path), json.dumps(config)]
    done = subprocess.run(argv, input="y\n" * 9, capture_output=True, text=True, check=True)
    assert str(tmp_path) in done.stdout and not hit.exists()


def test_ranks_have_no_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def placed(*_: object) -> None:
        done.append("placed")
        raise UserError("enough", "")

    told = Namespace(follow_stdin=False, port=None, address_suffix="")
    monkeypatch.setattr(launch, "_parse", lambda _: told)
    monkeypatch.setattr(launch, "_check", lambda _: None)
    monkeypatch.setattr(launch, "close_stdin", lambda: done.append("closed"))
    monkeypatch.setattr(launch, "placement_from", placed)
    with pytest.raises(UserError, match="enough"):
        launch.main([])
    assert done == ["closed", "placed"]


@pytest.mark.parametrize(
    "command", ["tokenize", "fetch", "untrained", "adapter", "generate", "scores"]
)
def test_commands_that_load_have_no_stdin(command: str) -> None:
    code = f"import sys; sys.argv = ['atoll', {command!r}, '--help']; import runpy\n"
    code += "try: runpy.run_module('atoll', run_name='__main__')\nexcept SystemExit: pass\n"
    code += "print('read:', repr(open(0).read()))"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, input="y\n", capture_output=True, text=True, check=True)
    assert done.stdout.endswith("read: ''\n")
