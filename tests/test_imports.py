"""Imports pause the collection of garbage, and leave it as it was."""

import gc
import subprocess
import sys

import pytest

from atoll.imports import imported, paused_garbage_collection


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.enable()


def test_a_module_is_imported_without_a_collection(tmp_path, monkeypatch):
    (tmp_path / "allocates.py").write_text(
        "import gc\nassert not gc.isenabled()\nkept = [[] for _ in range(100_000)]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    frozen, runs = gc.get_freeze_count(), sum(one["collections"] for one in gc.get_stats())
    assert len(imported("allocates").kept) == 100_000
    assert sum(one["collections"] for one in gc.get_stats()) == runs
    assert gc.isenabled() and gc.get_freeze_count() >= frozen + 100_000
    sys.modules.pop("allocates")


def test_what_is_imported_already_sets_nothing_aside():
    frozen = gc.get_freeze_count()
    assert imported("gc") is gc
    assert gc.get_freeze_count() == frozen and gc.isenabled()


def test_an_import_that_fails_leaves_collection_as_it_was():
    with pytest.raises(ModuleNotFoundError):
        imported("no_such_module_anywhere")
    assert gc.isenabled()
    gc.disable()
    with paused_garbage_collection():
        pass
    assert not gc.isenabled()


def test_a_commands_module_is_imported_so():
    code = (
        "import gc, importlib.util, sys; from atoll.__main__ import main\n"
        "class Seen:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'torch': print('collecting' if gc.isenabled() else 'paused')\n"
        "sys.meta_path.insert(0, Seen()); main(['make-delta'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "paused\n", done.stderr
