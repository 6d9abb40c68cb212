"""A campaign of two rounds, proven and signed; each test has a copy."""

import os
import shlex
import shutil
from pathlib import Path

import pytest
from proven import in_this_process, made_campaign

from atoll.campaign import average as averaging
from atoll.campaign.store import CampaignStore
from atoll.verify import again


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "run_atoll", in_this_process)
    monkeypatch.setattr(averaging, "run_atoll", in_this_process)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> CampaignStore:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(averaging, "run_atoll", in_this_process)
        return made_campaign(tmp_path_factory.mktemp("campaign"))


@pytest.fixture
def store(made: CampaignStore, tmp_path: Path) -> CampaignStore:
    shutil.copytree(made.folder, tmp_path / "c")
    return CampaignStore(made.campaign, tmp_path / "c")


@pytest.fixture
def older_openssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ssh-keygen of before 8.9, which knows nothing of match-principals."""
    file, newer = tmp_path / "older" / "ssh-keygen", str(shutil.which("ssh-keygen"))
    file.parent.mkdir()
    refusal = 'echo "Unsupported operation for -Y: \\"match-principals\\"" >&2; exit 1'
    file.write_text(
        f'#!/bin/sh\nif [ "$2" = match-principals ]; then {refusal}; fi\n'
        f'exec {shlex.join([newer])} "$@"\n'
    )
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{file.parent}:{os.environ['PATH']}")
