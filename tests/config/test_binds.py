"""A mount never hides what the image needs, whoever asks for it."""

import tempfile
from pathlib import Path

import pytest
import yaml

from atoll.cluster.job_script import launch_script
from atoll.cluster.launchers import exported
from atoll.cluster.start import write_run_folder
from atoll.config import binds as binds_module
from atoll.config.binds import FABRIC, binds
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


@pytest.mark.parametrize("name", ["a:b", "a,b", "a^b", "a b"])
def test_a_folder_that_no_bind_can_name_is_refused(name, composed, tmp_path):
    """The container would not start in the job: FATAL, after hours in the queue."""
    (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(name)
    for folder in (tmp_path / name, tmp_path / "link"):
        words = (*LINE, f"folders.prepared='{folder}'")
        if name == "a b":
            assert str(tmp_path / name) in binds(composed(*words).run)
            continue
        with pytest.raises(UserError, match=r"in its name, where apptainer's --bind") as caught:
            composed(*words)
        assert caught.value.found.startswith(f"{folder}: {name[1]} in its name")
        assert "another name" in caught.value.hint


def test_a_run_s_own_folders_are_binds_too(composed):
    with pytest.raises(UserError, match="bind /usr hides /usr of image=cuda"):
        composed(*LINE, "data=text_files", "data.files=/usr/words.txt")


@pytest.fixture
def shared_tmp(monkeypatch):
    """Where pytest's folders are in /tmp: as on a file system that all nodes share."""
    monkeypatch.setattr(binds_module, "NODES_OWN", ())


@pytest.mark.usefixtures("shared_tmp")
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


@pytest.mark.parametrize("place", ["/dev/shm/x", "/mnt/bb/me/hf"])
def test_a_cache_on_each_node_s_own_disk_is_left_to_the_job(place, composed, tmp_path):
    """The login node's folder of that name is another one; no container begins without a bind."""
    (tmp_path / "x.sif").touch()
    words = (*LINE, f"folders.prepared={tmp_path}/p", f"folders.runs={tmp_path}/r")
    words += (f"image.file={tmp_path}/x.sif", "facility.node_folder=/mnt/bb")
    words += (f"+folders.caches.HF_HOME={place}",)
    composition = composed(*words)
    assert exported(composition.run)["HF_HOME"] == place
    assert place not in binds(composition.run) and "/mnt/bb" in binds(composition.run)
    write_run_folder(composition)
    assert not Path(place).exists()
    here = composed(*words, "facility.scheduler=none").run
    assert place in binds(here), "it is this machine's"


def test_a_cache_of_the_login_node_s_own_disk_is_exported_and_not_bound(composed, monkeypatch):
    """Slurm's own /tmp of a job lacks it; apptainer shows all of /tmp."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        monkeypatch.setenv("HF_HOME", folder)
        run = composed(*LINE).run
        assert exported(run)["HF_HOME"] == folder and folder not in binds(run)


@pytest.mark.usefixtures("shared_tmp")
@pytest.mark.parametrize("name", ["XDG_CACHE_HOME", "HUGGINGFACE_HUB_CACHE", None])
def test_a_cache_that_is_elsewhere_by_another_word_or_a_link_is_bound(
    name, composed, tmp_path, monkeypatch
):
    real = tmp_path / "work" / "hf"
    real.mkdir(parents=True)
    home = tmp_path / "home"
    (home / ".cache").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    if name is None:
        (home / ".cache" / "huggingface").symlink_to(real)
    else:
        (tmp_path / "work" / "huggingface").symlink_to(real)
        folder = real if name.endswith("HUB_CACHE") else tmp_path / "work"
        monkeypatch.setenv(name, str(folder))
    run = composed(*LINE, "model.source=a/b").run
    assert str(real) in binds(run)
    assert list(run.folders.caches.values()) == [real]
    if name != "HUGGINGFACE_HUB_CACHE":  # which is no more than the login node's, for all we know
        assert composed(*LINE).run.folders.caches == {}, "nothing is read of the hub"
        tasks = composed(*LINE, "evaluation.tasks=[piqa]").run.folders.caches
        assert list(tasks.values()) == [real], "but a task's data is"


def test_what_links_in_a_given_folder_lead_to_is_bound(composed, tmp_path):
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    texts, book = tmp_path / "texts", tmp_path / "elsewhere" / "book.txt"
    for folder in (blobs, snapshot, texts, book.parent):
        folder.mkdir(parents=True)
    (blobs / "123").touch()
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    book.write_text("words")
    (texts / "a.txt").symlink_to(book)
    words = ("data=text_files", f"data.files={texts}/*.txt", f"model.source={snapshot}")
    found = binds(composed(*LINE, *words).run)
    assert {str(blobs), str(snapshot), str(texts), str(book.parent)} <= set(found)


@pytest.mark.parametrize("entry", ["{}", "{}/**/*.txt"])
def test_links_deeper_in_a_folder_of_text_are_followed(entry, composed, tmp_path):
    book, texts = tmp_path / "elsewhere" / "book.txt", tmp_path / "texts"
    for folder in (book.parent, texts / "en" / "old"):
        folder.mkdir(parents=True)
    book.write_text("words")
    (texts / "en" / "old" / "a.txt").symlink_to(book)
    words = ("data=text_files", f"data.files={entry.format(texts)}")
    assert {str(texts), str(book.parent)} <= set(binds(composed(*LINE, *words).run))


def test_links_that_lead_up_again_are_not_followed_round(composed, tmp_path):
    for language in ("de", "en"):
        (tmp_path / language).mkdir()
        (tmp_path / language / "all").symlink_to("..")
    (tmp_path / "en" / "a.txt").touch()
    (tmp_path / "en" / "mtab").symlink_to("/proc/mounts")  # no text, and another on each machine
    words = ("data=text_files", f"data.files={tmp_path}/**/*.txt")
    found = binds(composed(*LINE, *words).run)
    assert str(tmp_path) in found and not any(bind.startswith("/proc") for bind in found)


def test_a_folder_that_a_pattern_goes_through_by_a_link_is_bound(composed, tmp_path):
    """Else its text is missing in the container, and nobody is told."""
    (tmp_path / "data" / "en").mkdir(parents=True)
    (tmp_path / "far").mkdir()
    (tmp_path / "data" / "de").symlink_to(tmp_path / "far")
    for folder in ("data/en", "far"):
        (tmp_path / folder / "a.txt").touch()
    words = ("data=text_files", f"data.files={tmp_path}/data/*/*.txt")
    assert str(tmp_path / "far") in binds(composed(*LINE, *words).run)


def test_the_adapter_that_a_run_begins_with_is_bound(composed, tmp_path):
    """A round's, in a campaign of adapters: each job ended without it, wherever it had an image."""
    (tmp_path / "a").mkdir()
    words = ("+model.lora.rank=4", f"+model.lora.start={tmp_path}/a")
    assert str(tmp_path / "a") in binds(composed(*LINE, *words).run)


def test_an_adapter_s_and_a_data_set_s_folder_may_be_typed_from_here(
    composed, tmp_path, monkeypatch
):
    """A job starts in another folder, on PBS in the home folder."""
    for name in ("a", "ds"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    words = ("+model.lora.rank=4", "+model.lora.start=a", "data=hub", "data.hub=ds")
    run = composed(*LINE, *words).run
    assert run.model.lora.start == tmp_path / "a" and run.data.hub == str(tmp_path / "ds")
    assert {str(tmp_path / "a"), str(tmp_path / "ds")} <= set(binds(run))
    assert composed(*LINE, "data=hub", "data.hub=wikitext").run.data.hub == "wikitext"


@pytest.mark.usefixtures("shared_tmp")
def test_a_cache_of_one_s_own_is_made_and_bound(composed, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x.sif").touch()
    words = (*LINE, f"folders.runs={tmp_path}/runs", f"folders.prepared={tmp_path}/prepared")
    words += (f"image.file={tmp_path}/x.sif",)
    composition = composed(*words, "name=x", "+folders.caches.HF_HOME='~/hf'")
    assert str(tmp_path / "hf") in binds(composition.run)
    write_run_folder(composition)
    assert (tmp_path / "hf").is_dir(), "Apptainer begins no container without what it binds"


def test_text_that_was_put_away_keeps_no_container_from_its_start(composed, tmp_path):
    found = binds(composed(*LINE, "data=text_files", f"data.files={tmp_path}/gone/*.txt").run)
    assert f"{tmp_path}/gone" not in found and str(tmp_path) in found


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        (("model.source=/opt/nope/llama",), "/opt/nope"),
        (("model.source=/usr/share/nope/llama",), "/usr/share/nope"),
        (("data=text_files", "data.files=[/opt/nope/corpora/*.jsonl]"), "/opt/nope/corpora"),
    ],
)
def test_a_folder_that_is_not_there_hides_nothing_of_the_image(words, folder, composed):
    """It is mistyped, and said to be missing, or another machine has it."""
    found = binds(composed(*LINE, *words).run)
    assert folder in found and not {"/opt", "/usr", "/usr/share"} & set(found)


def test_a_folder_that_is_not_there_hides_nothing_that_this_image_needs(composed, tmp_path):
    (tmp_path / "hpcx").mkdir()
    words = (f"image.needs=[{tmp_path}/hpcx]", f"model.source={tmp_path}/nope/llama")
    assert f"{tmp_path}/nope" in binds(composed(*LINE, *words).run)


def test_a_folder_that_a_link_leads_away_from_another_is_bound_itself(composed, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "far").mkdir()
    (tmp_path / "texts" / "a.txt").touch()
    (tmp_path / "texts" / "runs").symlink_to(tmp_path / "far")
    words = ("data=text_files", f"data.files={tmp_path}/texts/a.txt")
    found = binds(composed(*LINE, *words, f"folders.runs={tmp_path}/texts/runs").run)
    assert f"{tmp_path}/far:{tmp_path}/texts/runs" in found


def test_a_network_s_plugin_and_libraries_may_be_in_the_home_folder(
    composed, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    network = "plugin: '~/ofi/lib/librccl-net.so', libraries: ['~/fabric', lib]"
    run = composed(*LINE, f"facility.network={{{network}}}").run
    assert {f"{tmp_path}/ofi/lib", f"{tmp_path}/fabric:{FABRIC}/0"} <= set(binds(run))
    assert f"{Path.cwd()}/lib:{FABRIC}/1" in binds(run)
    assert exported(run)["NCCL_NET_PLUGIN"] == f"{tmp_path}/ofi/lib/librccl-net.so"


def test_where_a_link_of_the_home_folder_leads_is_there_before_its_bind(composed, tmp_path):
    """A container has the home folder, link and all, before its binds."""
    (tmp_path / "lustre" / "runs").mkdir(parents=True)
    (tmp_path / "scratch").symlink_to("lustre")
    found = binds(composed(*LINE, f"folders.runs={tmp_path}/scratch/runs").run)
    real = f"{tmp_path}/lustre/runs"
    assert found.index(real) < found.index(f"{real}:{tmp_path}/scratch/runs")


def test_a_link_is_followed_by_the_name_that_it_says(composed, tmp_path):
    """A relative one, in a folder that is given by the name of another link."""
    (tmp_path / "lustre" / "blobs").mkdir(parents=True)
    (tmp_path / "lustre" / "run[1]").mkdir()
    (tmp_path / "scratch").symlink_to("lustre")
    (tmp_path / "lustre" / "blobs" / "123").touch()
    (tmp_path / "lustre" / "run[1]" / "config.json").symlink_to("../blobs/123")
    found = binds(composed(*LINE, f"model.source='{tmp_path}/scratch/run[1]'").run)
    assert f"{tmp_path}/lustre/blobs:{tmp_path}/scratch/blobs" in found


def test_links_that_lead_nowhere_or_into_the_image_are_left_alone(composed, tmp_path):
    for name, target in (("a", "/usr/bin/env"), ("b", "b"), ("c", "/no/where"), ("d", "/usr")):
        (tmp_path / name).symlink_to(target)
    assert binds(composed(*LINE, f"model.source={tmp_path}").run)[-1] == str(tmp_path)
    assert not {"/usr/bin", "/usr", "/no"} & set(
        binds(composed(*LINE, f"model.source={tmp_path}").run)
    )


def test_a_data_set_in_a_folder_is_bound_and_what_a_bundle_has_is_not(composed, tmp_path):
    words = ("data=hub", f"data.hub={tmp_path}/ds")
    (tmp_path / "ds").mkdir()
    run = composed(*LINE, *words).run
    assert run.data.hub in binds(run)
    folders = run.folders.model_copy(update={"bundle": tmp_path / "bundle"})
    assert f"{tmp_path}/ds" not in binds(run.model_copy(update={"folders": folders}))
    assert composed(*LINE, "data=hub", "data.hub=of_the/hub").run.data.hub == "of_the/hub"


def test_without_an_image_nothing_is_hidden(composed):
    composed("facility=generic_slurm", "facility.binds=[/opt]")


@pytest.mark.parametrize("name", sorted(path.stem for path in FACILITIES.glob("*.yaml")))
def test_every_facility_s_own_binds_leave_the_image_whole(name, composed):
    stated = yaml.safe_load((FACILITIES / f"{name}.yaml").read_text())
    nodes = stated.get("limits", {}).get("min_nodes", 1)
    ranks = nodes * stated["node"]["devices"]
    composed(f"facility={name}", f"nodes={nodes}", f"training.global_batch_samples={ranks}")
