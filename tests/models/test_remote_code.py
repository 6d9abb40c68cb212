"""The code of a model's or tokenizer's folder is never run, whatever anybody answers."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_commands_that_load_have_no_stdin() -> None:
    code = "import sys; sys.argv = ['atoll', 'tokenize', '--help']; import runpy\n"
    code += "try: runpy.run_module('atoll', run_name='__main__')\nexcept SystemExit: pass\n"
    code += "print('read:', repr(open(0).read()))"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, input="y\n", capture_output=True, text=True, check=True)
    assert done.stdout.endswith("read: ''\n")
