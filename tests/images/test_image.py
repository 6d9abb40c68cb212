"""Images: recipe, name by digest, the command that builds, and what does not fit a node."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from atoll import run_dir
from atoll.errors import UserError
from atoll.images import build as image
from atoll.images import check as image_check
from atoll.images import package_sources
from atoll.images import sif as image_sif
from atoll.images.digest import image_digest, keep_image
from atoll.images.recipe import build_arguments, recipe, source_digest, stage
from atoll.settings import dumped

ROOT = Path(__file__).parents[2]
BASES = ROOT / "containers" / "bases"
NAMES = sorted(path.stem for path in BASES.glob("*.args"))


def clone_of(folder: Path) -> Path:
    stage(ROOT, folder)
    return folder / "atoll"


def program(folder: Path, name: str, *lines: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    path.chmod(0o755)
    return path


def sif(path: Path, architecture: bytes = b"02") -> Path:
    path.write_bytes(b"\0" * 32 + b"SIF_MAGIC\x0001\0" + architecture + b"\0" * 64)
    return path


def test_an_image_is_for_all_to_read_whatever_the_umask_of_its_builder(tmp_path):
    before = os.umask(0o077)
    try:
        clone = clone_of(tmp_path)
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (clone, *clone.rglob("*"))}
    assert modes == {0o755, 0o644}


def test_every_base_answers_what_the_recipe_asks():
    assert NAMES == ["cpu", "cuda", "cuda12", "cuda_compat", "lumi", "rocm"]
    asked = set(re.findall(r"{{ (\w+) }}", (ROOT / "containers" / "atoll.def").read_text()))
    for name in NAMES:
        one = recipe(ROOT, name, None, "zstd")
        lines = build_arguments(one, "MIRROR", "2026-11-21T00:00:00+00:00").splitlines()
        assert {line.partition("=")[0] for line in lines} == asked


def test_the_recipe_is_what_every_runtime_can_read():
    definition = (ROOT / "containers" / "atoll.def").read_text()
    assert not re.search(r"^%(setup|pre)\b", definition, re.M)
    code = definition[definition.index("%post") :]
    assert set(re.findall(r"{{ (\w+) }}", code)) == {"title", "torch", "compat", "labels"}


def test_every_image_of_the_configuration_has_a_base():
    for path in (ROOT / "hydra_conf" / "image").glob("*.yaml"):
        args_file = yaml.safe_load(path.read_text()).get("args_file")
        assert (args_file is None) == (path.stem == "none")
        assert args_file is None or (BASES / args_file).is_file()


def test_the_name_follows_from_all_that_goes_in(tmp_path):
    clone = clone_of(tmp_path)
    first = recipe(clone, "cpu", "x86_64", "zstd").file_name
    assert re.fullmatch(r"cpu-[0-9a-f]{12}\.sif", first)
    assert recipe(clone, "cpu", "x86_64", "zstd").file_name == first
    assert recipe(clone, "cpu", "x86_64", "gzip").file_name != first
    assert recipe(clone, "cpu", "aarch64", "zstd").file_name != first
    (clone / "hydra_conf" / "local" / "default.yaml").parent.mkdir(exist_ok=True)
    (clone / "hydra_conf" / "local" / "default.yaml").write_text("seed: 1\n")
    assert recipe(clone, "cpu", "x86_64", "zstd").file_name == first
    for added in ("tests/test_more.py", "setup/more.py", "Makefile"):
        (clone / added).parent.mkdir(exist_ok=True)
        (clone / added).write_text("# nothing that a run reads\n")
    assert recipe(clone, "cpu", "x86_64", "zstd").file_name == first
    for part in ("src/atoll/errors.py", "containers/locks/image.txt", "containers/post.sh"):
        before = recipe(clone, "cpu", "x86_64", "zstd").file_name
        with (clone / part).open("a") as file:
            file.write("# more\n")
        assert recipe(clone, "cpu", "x86_64", "zstd").file_name != before


def test_names_that_are_not_known_are_refused():
    with pytest.raises(UserError, match="no image is called tpu"):
        recipe(ROOT, "tpu", None, "zstd")
    with pytest.raises(UserError, match="--compression=xz is not known"):
        recipe(ROOT, "cpu", None, "xz")
    with pytest.raises(UserError, match="--arch=riscv64 is not known"):
        recipe(ROOT, "cpu", "riscv64", "zstd")


def test_the_command_that_builds():
    one = recipe(ROOT, "cuda", "aarch64", "gzip")
    assert image.build_argv("apptainer", one, ["/wheels:/inside"], map_users=True) == [
        *("apptainer", "build", "--build-arg-file", "build.args", "--fakeroot"),
        *("--arch", "arm64", "--bind", "/wheels:/inside", "image.sif", "atoll.def"),
    ]
    assert "--fakeroot" not in image.build_argv("singularity", one, [], map_users=True)
    small = image.build_argv("apptainer", recipe(ROOT, "cpu", None, "zstd"), [], map_users=False)
    assert small[small.index("--mksquashfs-args") + 1].startswith("-comp zstd")


@pytest.mark.parametrize(
    ("program_name", "answer", "compression"),
    [
        ("apptainer", "apptainer version 1.4.5", "zstd"),
        ("apptainer", "apptainer version 1.3.6", "gzip"),
        ("singularity", "singularity-ce version 4.3.1-1.el9", "gzip"),
    ],
)
def test_a_runtime_that_writes_gzip_alone_is_not_asked_for_more(
    program_name, answer, compression, tmp_path
):
    """--mksquashfs-args is a flag of Apptainer since 1.4, and of no SingularityCE."""
    program(tmp_path / "programs", program_name, f"echo {answer}")
    here = {"PATH": str(tmp_path / "programs")}
    assert image.default_compression(here) == compression
    image.check_compression(recipe(ROOT, "cpu", None, "gzip"), here)
    if compression == "gzip":
        with pytest.raises(UserError, match=r"--compression=zstd, and .* writes gzip alone"):
            image.check_compression(recipe(ROOT, "cpu", None, "zstd"), here)
    assert image.default_compression({"PATH": str(tmp_path)}) == "zstd"


BUILD = [
    'if [[ $1 == --version ]]; then echo "apptainer version 1.4.5"; exit; fi',
    'printf "%s\\n" "$@" > "$CALLS"; [[ $1 == build ]] || exit 0',
    'env > "$CALLS.env"; cp build.args "$CALLS.args"',
    'echo "INFO: building"; echo "$SAYS" >&2; [[ -z $SAYS ]] || exit 255',
    'printf "a SIF" > image.sif',
]


@pytest.fixture
def build(tmp_path, monkeypatch):
    """`atoll image build cpu` in a clone of its own, with an apptainer that notes its call."""
    clone = clone_of(tmp_path / "clone")
    program(tmp_path / "programs", "apptainer", *BUILD)
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("SAYS", "")
    monkeypatch.setattr(image, "CLONE", clone)
    images = tmp_path / "images"
    words = ["build", "cpu", f"--images={images}", "--mirror=file:///mirror"]
    return lambda *more: (image.main([*words, *more]), images)[1]


def test_an_image_is_built_once_and_appears_whole(build, tmp_path):
    images = build()
    link = images / "cpu.sif"
    assert link.resolve().read_text() == "a SIF"
    assert re.fullmatch(r"cpu-[0-9a-f]{12}\.sif", link.resolve().name)
    assert sorted(path.name for path in images.iterdir()) == [link.resolve().name, "cpu.sif"]
    (tmp_path / "calls").unlink()
    build()
    assert not (tmp_path / "calls").exists()


def test_a_build_that_fails_leaves_what_was_there(build, tmp_path, monkeypatch):
    before = build().joinpath("cpu.sif").resolve()
    monkeypatch.setenv("SAYS", "FATAL: no fuse: fusermount failed")
    with pytest.raises(UserError) as caught:
        build("--compression=gzip")
    assert "ended with 255: FATAL: no fuse: fusermount failed" in caught.value.found
    assert "/dev/fuse" in caught.value.hint
    assert (tmp_path / "images" / "cpu.sif").resolve() == before
    assert len(list((tmp_path / "images").iterdir())) == 2


def test_the_tests_of_the_clone_run_inside_the_image(build, tmp_path):
    images = build()
    assert image.main(["test", "cpu", f"--images={images}", "-m", "image", "--full"]) == 0
    argv = (tmp_path / "calls").read_text().splitlines()
    assert f"{tmp_path / 'clone' / 'atoll' / 'tests'}:/opt/atoll/tests:ro" in argv
    assert argv[-3:] == ["-m", "image", "--full"]


def test_a_misspelt_option_is_refused(build):
    with pytest.raises(UserError, match="unknown option: --compresion") as caught:
        build("--compresion=gzip")
    assert caught.value.hint == "did you mean --compression?"


def test_a_cache_outside_the_clone_holds_the_file(build, tmp_path):
    images = build(f"--cache={tmp_path / 'cache'}")
    assert (images / "cpu.sif").resolve().parent == tmp_path / "cache"


def test_secrets_of_the_shell_go_into_no_build(build, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    build()
    assert "hf_very_secret" not in (tmp_path / "calls.args").read_text()
    inside = [
        line
        for line in (tmp_path / "calls.env").read_text().splitlines()
        if line.startswith(("APPTAINERENV_", "SINGULARITYENV_"))
    ]
    assert not [line for line in inside if "secret" in line]
    assert "hf_very_secret" not in (tmp_path / "calls").read_text()


@pytest.mark.parametrize(
    ("answer", "found"),
    [("apptainer version 1.1.9", "apptainer version 1.1.9 is too old: 1.3 is needed")],
)
def test_an_old_runtime_is_refused(answer, found, tmp_path):
    program(tmp_path / "programs", "apptainer", f"echo {answer}")
    with pytest.raises(UserError, match=re.escape(found)):
        image.container_runtime({"PATH": str(tmp_path / "programs")})


def test_a_machine_without_a_runtime_is_told_so(tmp_path):
    with pytest.raises(UserError, match="neither apptainer nor singularity is on PATH"):
        image.container_runtime({"PATH": str(tmp_path)})


def test_a_full_disk_is_named_before_the_build(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2 * 2**30))
    with pytest.raises(UserError, match=r"has 2\.0 GiB free, building cpu takes 6 GiB"):
        image.check_disk(tmp_path, recipe(ROOT, "cpu", None, "zstd"), "apptainer")


def test_the_disk_where_the_runtime_unpacks_is_looked_at(tmp_path, monkeypatch):
    small = tmp_path / "small"
    small.mkdir()
    monkeypatch.setenv("SINGULARITY_TMPDIR", str(small))
    usage = shutil.disk_usage(tmp_path)
    full = {small: 2 * 2**30}
    monkeypatch.setattr(
        shutil, "disk_usage", lambda place: usage._replace(free=full.get(Path(place), 2**50))
    )
    image.check_disk(tmp_path, recipe(ROOT, "cpu", None, "zstd"), "apptainer")
    with pytest.raises(UserError, match=r"small has 2\.0 GiB free") as caught:
        image.check_disk(tmp_path, recipe(ROOT, "cpu", None, "gzip"), "singularity")
    assert caught.value.hint.endswith("with SINGULARITY_TMPDIR")


def test_pip_s_own_sources_reach_the_build(tmp_path, monkeypatch):
    wheels, index = tmp_path / "wheels", tmp_path / "index" / "simple"
    wheels.mkdir()
    index.mkdir(parents=True)
    certificates = tmp_path / "ca.crt"
    certificates.touch()
    settings = {
        "index-url": "https://me:secret@index.example/simple",
        "extra-index-url": f"file://{index}",
        "find-links": f"{wheels} {wheels}",
        "cert": str(certificates),
    }
    monkeypatch.setattr(package_sources, "pip_settings", lambda: settings)
    found = package_sources.pip_sources({}, 3, "apptainer")
    inside = package_sources.INSIDE
    assert found.binds == [
        f"{tmp_path}/index:{inside}/0",
        f"{wheels}:{inside}/1",
        f"{certificates}:{inside}/certificates",
    ]
    assert found.environment == {
        "APPTAINERENV_PIP_INDEX_URL": "https://me:secret@index.example/simple",
        "APPTAINERENV_PIP_EXTRA_INDEX_URL": f"file://{inside}/0/simple",
        "APPTAINERENV_PIP_FIND_LINKS": f"{inside}/1 {inside}/1",
        "APPTAINERENV_PIP_CERT": f"{inside}/certificates",
        "APPTAINERENV_SSL_CERT_FILE": f"{inside}/certificates",
    }
    with pytest.raises(UserError, match="pip takes packages from 2 folders here"):
        package_sources.pip_sources({}, 1, "apptainer")
    names = package_sources.pip_sources({}, 3, "singularity").environment
    assert names and all(name.startswith("SINGULARITYENV_") for name in names)


def test_a_mirror_is_given_or_known_to_apt(tmp_path, monkeypatch):
    assert package_sources.debian_mirror("file:///mirror") == "file:///mirror"
    program(
        tmp_path / "programs", "apt-get", "echo Other o.example main; echo Debian d.example main"
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}:/usr/bin:/bin")
    assert package_sources.debian_mirror(None) == "d.example"
    program(tmp_path / "programs", "apt-get", "true")
    with pytest.raises(UserError, match="no mirror of Debian is known here"):
        package_sources.debian_mirror(None)


def test_an_image_must_be_there_and_for_the_nodes(composed, tmp_path):
    slurm, file = "facility=generic_slurm", tmp_path / "x.sif"
    run = composed(slurm, f"image.file={file}").run
    with pytest.raises(UserError, match=r"no image .*x\.sif"):
        image_check.check_image(run)
    file.write_text("no image")
    with pytest.raises(UserError, match=r"x\.sif is no SIF image"):
        image_check.check_image(run)
    image_check.check_image(composed(slurm, f"image.file={sif(file)}").run)
    sif(file, b"04")
    with pytest.raises(UserError, match="is for aarch64, the nodes are x86_64"):
        image_check.check_image(run)


def labelled(path: Path, **labels: str) -> Path:
    """As Apptainer writes it: a descriptor of some other kind, then that of its labels."""
    named = {name.replace("_", "."): text for name, text in labels.items()}
    text = json.dumps({"data": {"attributes": {"labels": named}}}).encode()
    numbers = (0, 0, 46, 48, 4096, 48 * 585, 40_000, 0)
    header = image_sif.HEADER.pack(b"", b"SIF_MAGIC", b"01", b"02", b"", *numbers)
    kinds = ((0x4001, b"Bootstrap"), (0x4006, text))
    descriptors = [
        image_sif.DESCRIPTOR.pack(kind, True, 1, 1, 0, 40_000 + 100 * number, len(data))
        for number, (kind, data) in enumerate(kinds)
    ]
    table = b"".join(words.ljust(585, b"\0") for words in descriptors)
    start = (header.ljust(4096, b"\0") + table).ljust(40_000, b"\0")
    path.write_bytes(start + kinds[0][1].ljust(100, b"\0") + text)
    return path


@pytest.mark.parametrize(
    ("facility", "image", "labels", "driver"),
    [
        ("leonardo", "cuda", {"atoll_cuda": "13.3"}, "535.274.02"),
        ("lumi", "rocm", {"atoll_rocm": "7.2.1"}, "6.3"),
    ],
)
def test_an_image_that_the_driver_cannot_run_is_refused_before_a_job_waits(
    facility, image, labels, driver, composed, tmp_path
):
    file = labelled(tmp_path / "x.sif", **labels)
    words = (f"facility={facility}", f"image={image}", f"image.file={file}")
    run = composed(*words, f"facility.driver='{driver}'").run
    with pytest.raises(UserError, match=r"the image has (CUDA 13.3, which|ROCm 7.2; the driver)"):
        image_check.check_image(run)
    labelled(tmp_path / "x.sif", atoll_cuda="12.8", atoll_rocm="6.4.1")
    image_check.check_image(run)


def test_what_is_no_table_of_labels_has_none(tmp_path):
    assert image_sif.labels(sif(tmp_path / "x.sif")) == {}
    whole = labelled(tmp_path / "y.sif", atoll_cuda="13.3").read_bytes()
    for cut in (0, 60, 4100, 4700, len(whole) - 3):
        (tmp_path / "y.sif").write_bytes(whole[:cut])
        assert image_sif.labels(tmp_path / "y.sif") == {}


def test_an_image_of_other_sources_is_told(composed, tmp_path):
    file = labelled(tmp_path / "x.sif", atoll_source="0123")
    words = ("facility=generic_slurm", "image=cpu", f"image.file={file}")
    assert image.made_of_others(composed(*words).run).endswith("runs those: make image-cpu")
    assert image.made_of_others(composed(*words, "image.bind_source=true").run) == ""
    labelled(file, atoll_source=source_digest(ROOT))
    assert image.made_of_others(composed(*words).run) == ""


def test_an_image_without_a_file_is_the_newest_of_its_name(composed, tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    line = ("facility=generic_slurm", "image=cpu", f"folders.images={images}")
    assert composed(*line).run.image.file == images / "cpu.sif"
    (images / "cpu-1.sif").touch()
    (images / "cpu.sif").symlink_to("cpu-1.sif")
    named = composed(*line).run
    assert named.image.file == images / "cpu-1.sif"
    (images / "cpu-2.sif").touch()
    image.point_to(images / "cpu.sif", images / "cpu-2.sif")
    newer = composed(*line).run
    assert newer.image.file == images / "cpu-2.sif"
    assert newer.name == named.name


@pytest.mark.parametrize(
    ("cuda", "driver", "compatible", "hint"),
    [
        ("13.3", "535.104.05", False, "image=cuda_compat"),
        ("13.3", "525.60", True, "an image with an older CUDA"),
        ("12.8", "470.57", False, "image=cuda_compat"),
        ("14.0", "580.95", False, "an image with an older CUDA"),
    ],
)
def test_a_cuda_that_the_driver_cannot_run_is_refused(cuda, driver, compatible, hint):
    with pytest.raises(UserError) as caught:
        image_check.check_driver(cuda, driver, compatible)
    assert f"CUDA {cuda}" in caught.value.found
    assert driver in caught.value.found
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("cuda", "driver", "compatible"),
    [("13.3", "580.82", False), ("13.3", "535.104.05", True), ("12.9", "535", False)],
)
def test_a_cuda_that_the_driver_runs_is_not(cuda, driver, compatible):
    image_check.check_driver(cuda, driver, compatible)


@pytest.mark.parametrize(("rocm", "driver"), [("7.2.1", "6.3"), ("6.0.3", "6.3"), ("7.0", "7.2.9")])
def test_a_rocm_is_compared_with_its_driver(rocm, driver):
    if rocm == "7.0":  # two releases away
        return image_check.check_rocm(rocm, driver)
    with pytest.raises(
        UserError, match=rf"ROCm {rocm[:3]}; the driver here is of ROCm 6.3, .*6.1 to"
    ):
        image_check.check_rocm(rocm, driver)


def test_lumi_s_own_words_on_its_driver_and_what_nobody_knows():
    for rocm in ("6.1", "6.3.3", "7.0.51831-abc"):
        image_check.check_rocm(rocm, "6.3")
    image_check.check_rocm("10.0", "6.3")


def test_an_image_without_kernels_for_the_device_is_refused(composed, tmp_path, monkeypatch):
    run = composed("facility=iris", "image.file=/images/x.sif", "facility.account=x").run
    folder = tmp_path / "run"
    run_dir.write_whole(run_dir.settings_file(folder), yaml.safe_dump(dumped(run)))
    monkeypatch.setattr(image_check, "LABELS", tmp_path / "labels.json")
    monkeypatch.setattr(image_check, "nvidia_capability", lambda: None)
    for built_for, fits in (("5.0 6.0 7.0", True), ("7.5 8.0 12.0+PTX", False)):
        (tmp_path / "labels.json").write_text(json.dumps({"atoll.devices": built_for}))
        if fits:
            image_check.check_inside(folder)
            continue
        with pytest.raises(UserError, match=r"built for 7.5, .*; the device here is 7.0"):
            image_check.check_inside(folder)


def test_the_label_of_devices_is_torch_s_own_list():
    sys.path.insert(0, str(ROOT / "containers"))
    import sbom

    assert sbom.built_for("sm_75 sm_80 sm_90a compute_120") == "7.5 8.0 9.0 12.0+PTX"
    assert sbom.built_for("gfx90a gfx942") == "gfx90a gfx942"


def test_a_base_says_where_its_tag_was_seen():
    for name in NAMES:
        text = (BASES / f"{name}.args").read_text()
        assert re.search(r"# Seen 2\d{3}-\d\d-\d\d|# Built and run here", text), name
    assert re.search(r"^from=.*:full-u24\w+-\d{8}_\d{6}$", (BASES / "lumi.args").read_text(), re.M)


def test_only_problems_of_our_packages_stop_a_build():
    sys.path.insert(0, str(ROOT / "containers"))
    import pip_check

    lock = "transformers==5.0 \\\n    --hash=sha256:1\nhuggingface_hub==1.0\n"
    before = "old 1 requires x, which is not installed.\n"
    vendor = "torch-tensorrt 2.13 has requirement numpy<2, but you have numpy 2.1.\n"
    extra = "jupyterlab 4 has requirement httpx<1, but you have httpx 1.0.\n"
    own = "huggingface-hub 1.0 requires hf-xet, which is not installed.\n"
    torch = "torch 2.13 has requirement sympy<1.14, but you have sympy 1.15.\n"
    assert pip_check.ours(before, lock, before + vendor + extra) == []
    assert pip_check.ours(before, lock, before + own + torch) == [own.strip(), torch.strip()]
    assert pip_check.ours("", lock, "No broken requirements found.\n") == []


def test_what_an_image_holds_is_listed(tmp_path):
    script = ROOT / "containers" / "sbom.py"
    listed = subprocess.run([sys.executable, script, "x"], capture_output=True, text=True)
    names = {part["name"].lower() for part in json.loads(listed.stdout)["components"]}
    assert {"torch", "transformers"} <= names
    lock = f"Transformers=={metadata.version('transformers')} \\\n    --hash=sha256:{'a' * 64}\n"
    (tmp_path / "lock.txt").write_text(lock)
    listed = subprocess.run(
        [sys.executable, script, "x", tmp_path / "lock.txt"], capture_output=True, text=True
    )
    bill = json.loads(listed.stdout)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    addresses = [part["bom-ref"] for part in bill["components"]]
    assert len(set(addresses)) == len(addresses)
    [one] = [part for part in bill["components"] if part["name"] == "transformers"]
    known = {entry["name"]: entry["value"] for entry in one["properties"]}
    assert known["atoll:lock:sha256"] == "a" * 64 and len(known["atoll:record:sha256"]) == 64
    printed = subprocess.run([sys.executable, script, "--labels"], capture_output=True, text=True)
    labels = dict(line.split(" ", 1) for line in printed.stdout.splitlines())
    assert set(labels) >= {"atoll.torch", "atoll.python", "atoll.architecture"}


def test_an_image_says_what_it_holds(tmp_path, monkeypatch, capsys):
    """The recipe writes it where `inspect --sbom` reads it, and its digest among the labels."""
    recipe_text = (ROOT / "containers" / "post.sh").read_text()
    assert image.SBOM == "/opt/atoll/sbom/sbom.cdx.json"
    assert '"$locks/image.txt" > $atoll/sbom/sbom.cdx.json' in recipe_text
    assert "printf 'atoll.sbom %s" in recipe_text
    program = tmp_path / "apptainer"
    program.write_text('#!/bin/sh\n[ "$1" = --version ] && echo 1.3.0 || echo "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "x.sif").touch()
    assert image.main(["inspect", str(tmp_path / "x.sif"), "--sbom"]) == 0
    assert capsys.readouterr().out.endswith(f"x.sif cat {image.SBOM}\n")


def test_the_lock_never_replaces_what_the_vendor_built():
    text = (ROOT / "containers" / "post.sh").read_text()
    assert "comm -23" in text
    names = set(
        re.findall(r"^([a-z0-9-]+)==", (BASES.parent / "locks/image.txt").read_text(), re.M)
    )
    assert {"hydra-core", "transformers", "bitsandbytes", "pytest"} <= names
    assert not names & {"torch", "triton"}


def test_an_image_is_hashed_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = sif(tmp_path / "cpu-1.sif")
    link = tmp_path / "cpu.sif"
    link.symlink_to(file)
    wanted = run_dir.sha256_of(file)
    keep_image(link, tmp_path / "run")
    kept = json.loads(run_dir.image_file(tmp_path / "run").read_text())
    assert kept == {"file": "cpu-1.sif", "sha256": wanted}
    with monkeypatch.context() as patch:
        patch.setattr(run_dir, "sha256_of", lambda path: "taken anew")
        assert image_digest(link) == wanted
        sif(file, b"04").write_bytes(file.read_bytes() + b"more")
        assert image_digest(link) == "taken anew"
    (tmp_path / "cpu-1.sif.sha256.json").write_text("[]")
    assert image_digest(file) == run_dir.sha256_of(file)
