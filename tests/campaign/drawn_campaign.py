"""A campaign whose training is drawn: all else that coordinator and facilities do is real."""

import io
import json
import shutil
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import made_up
import pytest
import torch
from torch import Tensor

from atoll.__main__ import main
from atoll.campaign import average, own_weights, site_models
from atoll.campaign import round as round_
from atoll.campaign.journal import Journal, round_name, round_number
from atoll.campaign.lasting_settings import keep_settings
from atoll.campaign.store import CampaignStore, checked_campaign
from atoll.campaign.transfer import Unreachable
from atoll.federation.global_model import first_global
from atoll.federation.make_delta import make_delta
from atoll.settings.federation import Site
from atoll.verify import again as verify_again

SHAPES = {
    "embed": (30, 8), "layers.0.w": (65, 9), "layers.1.w": (64, 9), "layers.2.w": (64, 9),
    "norm": (9,),
}  # fmt: skip
NAMES = ("north", "south")
Draw = Callable[[str, int, str, Tensor], Tensor]  # facility, round, tensor, its values


class Killed(BaseException):
    """The coordinator is gone, whatever it was at."""


def drawn(facility: str, number: int, name: str, values: Tensor) -> Tensor:
    """What training adds: the same again, and other for each facility, round and tensor."""
    seed = 1000 * number + 31 * ord(facility[0]) + list(SHAPES).index(name)
    generator = torch.Generator().manual_seed(seed)
    return 1e-3 * torch.randn(values.shape, generator=generator)


@dataclass
class Facilities:
    """How they answer, train and send."""

    draw: Draw = drawn
    made: Callable[[str, int, Path], None] = lambda *_: None  # facility, round, its update
    kill_at: int = 0  # the so many-th thing that the coordinator does
    done: int = 0
    late: Collection[str] = ()
    away: Collection[str] = ()
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
        if site.name in self.away:
            raise Unreachable("the line is down", "wait")
        is_measure = "--measure" in words
        here = folder / ("losses" if is_measure else "rounds") / round_name(number)
        if not Journal(here).last("asked"):
            Journal(here).append("asked", request=request)
        have = site_models.make_bases(folder, newest + 1, [])
        if have < newest:
            return json.dumps({"state": "needs", "have": have})
        if is_measure:
            return json.dumps({"state": "ready", "losses": [2.0]})
        if not (here / "update" / "manifest.json").is_file():
            self.train(folder, here, request, folder / "bases" / round_name(newest))
            self.made(site.name, number, here / "update")
        if site.name in self.late:
            return json.dumps({"state": "running"})
        return json.dumps({"state": "ready", "losses": [3.0, 2.0]})

    def train(self, folder: Path, here: Path, request: dict[str, Any], base: Path) -> None:
        number, run = request["round"], folder / "runs" / here.name
        start = made_up.read(own_weights.begins_with(folder, here, request, base))
        facility = request["facility"]
        trained = {n: x + self.draw(facility, number, n, x) for n, x in start.items()}
        shutil.rmtree(run, ignore_errors=True)
        made_up.write_model(run / "export", trained, files=1)
        Journal(here).append("submitted", run=str(run))
        about = made_up.about(facility, round=number, tokens=640)
        fragment = (request["fragments"], request["fragment_pattern"], request["fragment"])
        kept = {round_number(p.parent): p for p in (folder / "rounds").glob("*/residual")}
        own = [n for n in kept if n < number and (n - number) % fragment[0] == 0]
        previous = own_weights.residual_round(base, request, own)
        last = None if previous is None else kept[previous]
        update, residual = here / "update", here / "residual"
        make_delta(base, run / "export", last, request["codec"], update, residual, about, fragment)
        made = {round_number(p.parent) for p in (folder / "rounds").glob("*/update")}
        all_own = [n for n in made if n < number and (n - number) % fragment[0] == 0]
        assert previous == own_weights.residual_round(base, request, all_own), "one is missed"
        for old in own_weights.needless_residuals(base, request, own, previous):
            shutil.rmtree(kept[old])

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

    def put_in_place(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("ask", "fetch", "send"):
            patch.setattr(round_, name, getattr(self, name))
        for module in (average, own_weights, site_models, verify_again):
            patch.setattr(module, "run_atoll", self.command)
        for module in (own_weights, site_models):
            patch.setattr(module, "container_side", lambda *_: [])
        patch.setattr("atoll.campaign.asked.sequence_tokens", lambda *_: 16)


def campaign_values(folder: Path, names: Sequence[str] = NAMES, **changes: Any) -> dict[str, Any]:
    sites = [{"name": name, "folder": str(folder / name)} for name in names]
    values = {"name": "c", "sites": sites, "start": [], "rounds": 4, "steps": 10}
    values |= {"batch_samples": 4, "poll_seconds": 0.01, "last_loss": False}
    return values | changes


def begun(folder: Path, values: dict[str, Any]) -> CampaignStore:
    """A campaign with its first model."""
    store = CampaignStore(checked_campaign(values), folder / "c")
    generator = torch.Generator().manual_seed(0)
    start = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in SHAPES.items()}
    store.round(0).mkdir(parents=True)
    first_global(made_up.write_model(folder / "start", start), store.model(0), {"round": 0})
    return keep_settings(store)


def one_round(
    store: CampaignStore,
    facilities: Facilities,
    number: int,
    late: Collection[str] = (),
    away: Collection[str] = (),
) -> bool:
    """late: those at work when the round ends; away: those that do not answer."""
    facilities.late, facilities.away = late, away
    store.deadline(number)
    for _ in range(12):
        for site in store.unsettled(number):
            round_.go_on(store, number, site)
    store.leave_out_late(number)
    return average.average(store, number)
