"""All else is in pyproject.toml; here is what a wheel carries of its clone, for `atoll init`.

It stands as atoll/working_folder inside the package. An editable install has the clone itself.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CARRIED = ("hydra_conf", "sbatch", "containers", "docs")
FILES = (".gitignore", "LICENSE", "README.md", "pyproject.toml")
OWN = ROOT / "setup" / "working_folder"  # files that a working folder has and a clone has not


class BuildWithWorkingFolder(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "atoll" / "working_folder"
        shutil.rmtree(target, ignore_errors=True)  # of an earlier build
        for part in CARRIED:
            leave = shutil.ignore_patterns("__pycache__", "local", "reference")
            shutil.copytree(ROOT / part, target / part, ignore=leave)
        local = Path("hydra_conf", "local", "README.md")  # the rest of it is one user's own
        (target / local).parent.mkdir()
        for name in (*FILES, local):
            shutil.copy2(ROOT / name, target / name)
        shutil.copytree(OWN, target, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithWorkingFolder})
