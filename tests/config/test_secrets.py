"""Secrets stay out of run folders, and nobody else can change what a job runs."""

import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from atoll import run_dir
from atoll.campaign.store import checked_campaign
from atoll.cluster.submit import dry_run
from atoll.config.compose import compose, path_word
from atoll.errors import UserError
from atoll.settings.machine import SECRET_NAME

LAPTOP = ["experiment=demo", "facility=laptop", "ranks_per_node=1", "sharding=single"]
SECRETS = ["HF_TOKEN", "hf_token", "MYTOKEN", "OPENAI_KEY", "GITHUB_PAT", "PGPASS", "PAT"]
SECRETS += ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "MYCREDENTIALS"]
SECRETS += ["PRIVATEKEYPEM", "MYPAT", "AZUREPAT", "SSH_PRIVATE_KEY_DATA", "APIKEYS2"]
SECRETS += ["HF_TOKENS", "TOKEN2", "OPENAI_API_KEY1", "HUGGINGFACEHUB_API_TOKEN1", "APPKEY"]
SECRETS += ["ADMINKEY", "ENCRYPTIONKEY", "AWS_ACCESS_KEYID", "SSH_KEYFILE", "DB_PASS1", "DBPASS2"]
SECRETS += ["PGPASSFILE", "GHPAT", "GITHUBPAT", "GITHUB_PAT2", "CREDS", "KEYS", "MYSQL_PWD"]
PLAIN = ["PATH", "LD_LIBRARY_PATH", "TOKENIZERS_PARALLELISM", "NCCL_IB_PKEY", "UCX_TLS"]
PLAIN += ["FI_CXI_COMPAT", "NCCL_IB_BYPASS", "KEYBOARD", "MONKEY", "DONKEYS", "COMPASS", "PKEY"]
PLAIN += [
    "UCX_IB_PKEY",
    "MIOPEN_USER_DB_PATH",
    "TOKENIZER",
    "PASSIVE",
    "PATTERN",
    "COMPASS2",
    "PWD",
    "OLDPWD",
    "APPTAINER_PWD",
]


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_are_known_by_their_names(name: str) -> None:
    with pytest.raises(UserError, match="looks like a secret"):
        compose([*LAPTOP, f"facility.environment.{name}=x"])
    with pytest.raises(UserError, match=f"submit gives {name}, which looks"):
        compose([*LAPTOP, f"facility.submit.export='ALL,{name}=x'"])


@pytest.mark.parametrize("setting", ["facility.step", "facility.task_binding", "image.run_flags"])
def test_flags_give_no_secret(setting: str) -> None:
    with pytest.raises(UserError, match=f"{setting} gives HF_TOKEN"):
        compose([*LAPTOP, f"{setting}=['--env','A=b,HF_TOKEN=x']"])


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("folders.caches.HF_TOKEN=/abc", "folders.caches.HF_TOKEN looks"),
        ("facility.task_folders.HF_TOKEN=/abc", "facility.task_folders.HF_TOKEN looks"),
        ("facility.environment.X='HF_TOKEN=abc'", "facility.environment.X gives HF_TOKEN"),
        ("facility.budget.command=[env,'HF_TOKEN=x',id]", "budget.command gives HF_TOKEN"),
        ("facility.ssh_options=['-oSetEnv=HF_TOKEN=x']", "ssh_options gives HF_TOKEN"),
        ("facility.ssh_options=['-o','SetEnv A=b HF_TOKEN=x']", "ssh_options gives HF_TOKEN"),
    ],
)
def test_whatever_is_exported_or_handed_on_gives_no_secret(word: str, found: str) -> None:
    with pytest.raises(UserError, match=found) as error:
        compose([*LAPTOP, word])
    assert "export HF_TOKEN in the shell" in error.value.hint


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"ssh_options": ["-oSetEnv=HF_TOKEN=x"]}, "ssh_options gives HF_TOKEN"),
        ({"train": ["facility.environment.HF_TOKEN=x"]}, "train gives HF_TOKEN"),
        ({"train": ["+facility.environment={A:b,HF_TOKEN:x}"]}, "train gives HF_TOKEN"),
        ({"train": ["facility.submit.export='ALL,HF_TOKEN=x'"]}, "train gives HF_TOKEN"),
        ({"start": ["folders.caches.HF_TOKEN=x"]}, "start gives HF_TOKEN"),
        ({"command": ["env", "HF_TOKEN=x", "atoll"]}, "the command of reef gives HF_TOKEN"),
        ({"overrides": ["image.run_flags=['--env','HF_TOKEN=x']"]}, "the overrides of reef gives"),
        ({"train": ["image={run_flags:['--env','HF_TOKEN=x']}"]}, "train gives HF_TOKEN"),
    ],
)
def test_a_campaign_keeps_no_secret(changes: dict[str, list[str]], found: str) -> None:
    site: dict[str, object] = {"name": "reef", "folder": "x"}
    own = {name: changes.pop(name) for name in ("command", "overrides") if name in changes}
    with pytest.raises(UserError, match=found) as error:
        checked_campaign({"name": "c", "sites": [site | own], "start": []} | changes)
    assert "export HF_TOKEN at the facility" in error.value.hint and "x'" not in error.value.found


def test_words_of_a_run_that_only_sound_like_secrets_are_kept() -> None:
    words = ["tokenizer.vocabulary_tokens=300", "data.sequence_tokens=32", "image.verify_key=k.pub"]
    words += ["facility.environment.NCCL_IB_PKEY=3", "facility.binds=[/tokens:/keys]"]
    options = ["-o", "UpdateHostKeys=no", "-oPasswordAuthentication=no", "-oRevokedHostKeys=x"]
    site = {"name": "reef", "folder": "x", "overrides": words, "command": ["env", "A=b", "atoll"]}
    values = {"name": "c", "sites": [site], "start": words, "train": words}
    assert checked_campaign(values | {"ssh_options": options}).train == words
    listed = ",".join(f"'{word}'" for word in options)
    compose([*LAPTOP, f"facility.ssh_options=[{listed}]", "folders.caches.HF_HOME=/x"])


def test_other_variables_are_no_secrets() -> None:
    assert not [name for name in PLAIN if SECRET_NAME.search(name)]
    compose([*LAPTOP, "facility.submit.export='ALL,HF_TOKEN'"])  # by its name: it stays there


def test_a_newline_in_a_path_is_quoted_in_a_dry_run(tmp_path: Path) -> None:
    folder = tmp_path / "a\ntouch hit"
    run = compose([*LAPTOP, path_word("folders.runs", folder), "name=x"]).run
    text = dry_run(run)
    lines = [line for line in text.splitlines() if line.startswith("touch hit")]
    quoted = shlex.quote(str(folder / "x" / "launch.sh"))
    assert "\\ntouch hit" in text.splitlines()[0] and quoted not in text.splitlines()[0]
    alone = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert alone.returncode == 0 and all("'" in line for line in lines)


def test_what_a_job_runs_is_not_writable_by_others(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run_dir.write_whole(tmp_path / "launch.sh", "true\n")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "launch.sh").stat().st_mode) == 0o664
    code = "import os,sys,runpy; os.umask(0); sys.argv = ['atoll', 'help'];"
    code += "\ntry: runpy.run_module('atoll', run_name='__main__')\nexcept SystemExit: pass"
    code += "\nos.mkdir('made')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) & 0o002 == 0
