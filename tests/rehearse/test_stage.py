"""What stands in for a facility's folders, modules and launcher."""

import subprocess
from pathlib import Path

from atoll.rehearse.stage import Stage
from atoll.settings.machine import Modules


def test_a_bind_keeps_its_destination_and_gets_an_empty_source(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    assert stage.bind("/opt/cray") == f"{tmp_path}/facility/opt/cray:/opt/cray"
    assert stage.bind("/a/b:/c:ro") == f"{tmp_path}/facility/a/b:/c:ro"
    assert list((tmp_path / "facility/opt/cray").iterdir()) == []
    stage.bind("/usr/lib64/libcxi.so.1")
    assert (tmp_path / "facility/usr/lib64/libcxi.so.1").is_file()


def test_a_module_brings_the_programs(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.write_modules(Modules(load=["singularity/4.1.0-slurm"]))
    text = (tmp_path / "modulefiles/singularity/4.1.0-slurm").read_text()
    assert text == f"#%Module1.0\nprepend-path PATH {tmp_path}/bin\n"
    stage.write_modules(Modules(use=["/soft/modulefiles"], load=["apptainer"]))
    assert (tmp_path / "facility/soft/modulefiles/apptainer").exists()


def mpiexec(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    real = folder / "real"
    real.write_text('#!/bin/bash\nprintf "%s\\n" "$PBS_NODEFILE" "$*"\n')
    real.chmod(0o755)
    stage = Stage(folder)
    stage.write_programs("apptainer", ["x1.site", "x1.site", "x2.site"], str(real))
    command = [str(stage.programs / "mpiexec"), *words]
    return subprocess.run(command, capture_output=True, text=True)


def test_mpiexec_reads_the_flags_of_pals(tmp_path: Path) -> None:
    words = ["-n", "8", "--ppn", "4", "--cpu-bind", "list:0-7:8-15", "python3", "-n", "x y"]
    done = mpiexec(tmp_path, *words)
    node_file, line = done.stdout.split("\n", 1)
    assert Path(node_file).read_text() == "x1.site\nx1.site\nx2.site\n"
    assert line.startswith("-n 8 -ppn 4 bash -c") and line.endswith("pals python3 -n x y\n")


def test_mpiexec_refuses_a_flag_that_pals_has_not(tmp_path: Path) -> None:
    done = mpiexec(tmp_path, "--kill-on-bad-exit", "true")
    assert done.returncode == 2
    assert "unknown flag --kill-on-bad-exit" in done.stderr
