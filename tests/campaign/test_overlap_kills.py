"""The coordinator killed wherever it may be while rounds of fragments overlap: the same models."""

import io
import json
import shutil
import threading
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import made_up
import pytest
import torch

from atoll.__main__ import main
from atoll.campaign import average, coordinator, own_weights, site_models
from atoll.campaign import round as round_
from atoll.campaign.journal import Journal, round_name
from atoll.campaign.store import CampaignStore, checked_campaign
from atoll.federation.global_model import first_global
from atoll.federation.make_delta import make_delta
from atoll.settings.federation import Site
from atoll.verify import again as verify_again

SHAPES = {"embed": (30, 8), "layers.0.w": (65, 9), "layers.1.w": (64, 9), "norm": (9,)}
RULE = {"fragments": 2, "overlap_rounds": 1, "merge_alpha": 0.5, "update": "nesterov"}
RULE |= {"learning_rate": 0.7, "max_norm_ratio": 1e6}


class Killed(BaseException):
    """The coordinator is gone, whatever it was at."""


@dataclass
class Facilities:
    """Two whose training is a drawn difference; all else that they do is real."""

    kill_at: int = 0  # the so many-th thing that the coordinator does
    done: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self) -> None:
        with self.lock:
            self.done += 1
            if self.done == self.kill_at:
                raise Killed

    def ask(self, campaign: Any, site: Site, words: list[str], over: Any) -> str:
        self.count()
        request, folder = json.loads(words[4]), Path(site.folder)
        number, newest = request["round"], request["global_round"]
        here = folder / "rounds" / round_name(number)
        if not Journal(here).last("asked"):
            Journal(here).append("asked", request=request)
        have = site_models.make_bases(folder, newest + 1, [])
        if have < newest:
            return json.dumps({"state": "needs", "have": have})
        if not (here / "update" / "manifest.json").is_file():
            self.train(folder, here, request, folder / "bases" / round_name(newest))
        return json.dumps({"state": "ready", "losses": [3.0, 2.0]})

    def train(self, folder: Path, here: Path, request: dict[str, Any], base: Path) -> None:
        number, run = request["round"], folder / "runs" / here.name
        start = made_up.read(own_weights.begins_with(folder, here, request, base))
        draws = torch.Generator().manual_seed(1000 * number + ord(request["facility"][0]))
        trained = {n: x + 1e-3 * torch.randn(x.shape, generator=draws) for n, x in start.items()}
        shutil.rmtree(run, ignore_errors=True)
        made_up.write_model(run / "export", trained, files=1)
        Journal(here).append("submitted", run=str(run))
        about = made_up.about(request["facility"], round=number, tokens=640)
        fragment = (request["fragments"], request["fragment_pattern"], request["fragment"])
        before = folder / "rounds" / round_name(number - 2) / "residual"
        last = before if before.is_dir() else None
        update, residual = here / "update", here / "residual"
        make_delta(base, run / "export", last, request["codec"], update, residual, about, fragment)

    def fetch(
        self, campaign: Any, site: Site, source: str, target: Path, names: Sequence[str], *_: Any
    ) -> None:
        self.count()
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            if (Path(source) / name).is_file():
                shutil.copy(Path(source) / name, target / name)

    def send(
        self, campaign: Any, site: Site, source: Path, target: str, *_: Any, **__: Any
    ) -> None:
        self.count()
        shutil.copytree(source, target, dirs_exist_ok=True)

    def command(self, argv: list[str], what: str) -> str:
        """A command without a process of its own, which would load torch anew."""
        if argv[0] in ("apply-delta", "merge-global"):  # in threads, and they say nothing
            assert main(argv) == 0
            return ""
        self.count()
        with redirect_stdout(io.StringIO()) as output:
            assert main(argv[argv.index("aggregate") :]) == 0
        return output.getvalue()


def digests(folder: Path, patch: pytest.MonkeyPatch, kill_at: int = 0) -> tuple[list[str], int]:
    """Of the models of four rounds, and how many things the coordinator did before it was done."""
    sites = [{"name": name, "folder": str(folder / name)} for name in ("north", "south")]
    values = {"name": "c", "sites": sites, "start": [], "rounds": 4, "rule": RULE, "steps": 10}
    values |= {"batch_samples": 4, "poll_seconds": 0.01, "last_loss": False}
    store = CampaignStore(checked_campaign(values), folder / "c")
    draws = torch.Generator().manual_seed(0)
    start = {name: torch.randn(shape, generator=draws) * 0.02 for name, shape in SHAPES.items()}
    store.round(0).mkdir(parents=True)
    first_global(made_up.write_model(folder / "start", start), store.model(0), {"round": 0})
    facilities = Facilities(kill_at)
    for name in ("ask", "fetch", "send"):
        patch.setattr(round_, name, getattr(facilities, name))
    for module in (average, own_weights, site_models):
        patch.setattr(module, "run_atoll", facilities.command)
    for module in (own_weights, site_models):
        patch.setattr(module, "container_side", lambda *_: [])
    patch.setattr("atoll.campaign.asked.sequence_tokens", lambda *_: 16)
    try:
        coordinator.run(store)
    except Killed:  # goes on, and whoever types the line again changes what may change
        later = values | {"rule": RULE | {"below_quorum": "hold"}}
        coordinator.run(CampaignStore(checked_campaign(later), folder / "c"))
    assert not store.left_out(1) and len(store.updates(4)) == 2
    return [store.model_manifest(n)["digest"] for n in range(5)], facilities.done


def test_killed_anywhere_it_goes_on_to_the_same_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, things = digests(tmp_path / "whole", monkeypatch)
    assert len(set(whole)) == 5 and things > 30
    for kill_at in range(2, things, 7):
        killed, _ = digests(tmp_path / str(kill_at), monkeypatch, kill_at)
        assert killed == whole, f"killed at {kill_at} of {things}"
    capsys.readouterr()
    monkeypatch.setattr(verify_again, "run_atoll", Facilities().command)
    for name in ("whole", str(kill_at)):
        model = tmp_path / name / "c" / round_name(4) / "global"
        assert main(["verify", str(model / "export")]) == 0
        output = capsys.readouterr().out
        for number in range(1, 5):
            assert f"round {number}: aggregated again, bit for bit (2)" in output
    # an update that was deleted, and is fetched again from its facility
    kept = tmp_path / name / "c" / round_name(2) / "north" / "update"
    shutil.rmtree(kept)
    again = ["verify", str(model / "export"), "--round", "2"]
    assert main(again) == 0 and "not at hand  round 2: what its aggr" in capsys.readouterr().out
    shutil.copytree(tmp_path / name / "north" / "rounds" / round_name(2) / "update", kept)
    assert main(again) == 0
    assert "round 2: aggregated again, bit for bit (2)" in capsys.readouterr().out
