"""A mount never hides what the image needs, whoever asks for it."""

from pathlib import Path

import pytest
import yaml

from atoll.cluster.job_script import launch_script
from atoll.config.binds import binds
from atoll.errors import UserError

FACILITIES = Path(__file__).parents[2] / "hydra_conf" / "facility"
LINE = ("facility=generic_slurm", "image=cuda", "image.file=/images/x.sif", "folders.runs=/runs")


@pytest.mark.parametrize(
    ("bind", "hidden"),
    [
        ("/opt", "/opt/atoll, /opt/hpcx"),
        ("/opt/hpcx/", "/opt/hpcx"),
        ("/scratch/own:/opt/hpcx:ro", "/opt/hpcx"),
        ("/usr", "/usr"),
        ("/usr/local:/usr", "/usr"),
        ("/", "/opt/atoll"),
    ],
)
def test_a_bind_that_hides_what_the_image_needs_is_refused(bind, hidden, composed):
    with pytest.raises(UserError) as caught:
        composed(*LINE, f"facility.binds=['{bind}']")
    assert caught.value.found.startswith(f"bind {bind} hides {hidden}")
    assert "facility.binds" in caught.value.hint


@pytest.mark.parametrize("bind", ["/opt/cray", "/usr/lib64/libcxi.so.1", "/opt:/host/opt", "/soft"])
def test_a_bind_beside_or_below_it_is_not(bind, composed):
    assert composed(*LINE, f"facility.binds=['{bind}']").run.facility.binds == [bind]


def test_a_run_s_own_folders_are_binds_too(composed):
    with pytest.raises(UserError, match="bind /usr hides /usr of image=cuda"):
        composed(*LINE, "data=text_files", "data.files=/usr/words.txt")


def test_the_hub_s_caches_are_bound_and_exported(composed, tmp_path, monkeypatch):
    cache = tmp_path / "scratch" / "hf"
    cache.mkdir(parents=True)
    monkeypatch.setenv("HF_HOME", str(cache))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "nowhere"))
    run = composed(*LINE).run
    assert run.folders.caches == {"HF_HOME": cache}
    assert str(cache) in binds(run)
    script = launch_script(run, Path("/runs/x"))
    assert f"export HF_HOME={cache}\n" in script
    assert f"--bind {cache} " in script
    assert run.name == composed(*LINE, "folders.caches.HF_HOME=/tmp").run.name


def test_without_an_image_nothing_is_hidden(composed):
    composed("facility=generic_slurm", "facility.binds=[/opt]")


@pytest.mark.parametrize("name", sorted(path.stem for path in FACILITIES.glob("*.yaml")))
def test_every_facility_s_own_binds_leave_the_image_whole(name, composed):
    stated = yaml.safe_load((FACILITIES / f"{name}.yaml").read_text())
    nodes = stated.get("limits", {}).get("min_nodes", 1)
    ranks = nodes * stated["node"]["devices"]
    composed(f"facility={name}", f"nodes={nodes}", f"training.global_batch_samples={ranks}")
