"""What a job of PBS settles before its ranks start, and where its output is."""

import os
import subprocess
from pathlib import Path

from atoll import run_dir
from atoll.cluster.job_control import newest_output
from atoll.cluster.job_script import around_job

SHOWN = 'printf "%s\\n" "$PBS_NODEFILE" "${OMP_NUM_THREADS-unset}"\n'


def test_containers_see_the_node_file_and_ranks_count_their_own_threads(tmp_path: Path) -> None:
    """PBS keeps the file where no container looks, and says how many cores its chunk has."""
    folder, node_file = tmp_path / "runs" / "x", tmp_path / "spool" / "aux"
    node_file.parent.mkdir()
    node_file.write_text("x1.site\nx1.site\nx2.site\n")
    run_dir.write_whole(run_dir.job_script(folder), around_job())
    run_dir.write_whole(
        run_dir.launch_script(folder), f"source {run_dir.job_script(folder)} {folder} pbs\n{SHOWN}"
    )
    given = {"PBS_NODEFILE": str(node_file), "PBS_JOBID": "7.site", "OMP_NUM_THREADS": "64"}
    done = subprocess.run(
        ["bash", run_dir.launch_script(folder)],
        env=os.environ | given,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    seen, threads = done.stdout.splitlines()
    assert Path(seen).is_relative_to(folder) and threads == "unset"
    assert Path(seen).read_text() == node_file.read_text()
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_a_link_to_what_a_node_keeps_is_no_output_here(tmp_path: Path) -> None:
    (tmp_path / "pbs.out").write_text("words\n")
    (tmp_path / "pbs-7.out").symlink_to("/var/spool/pbs/spool/7.OU")
    assert newest_output(tmp_path) == tmp_path / "pbs.out"
