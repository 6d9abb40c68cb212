"""Five rounds of server steps: ours against Flower's, on the same updates.

    python -m venv FOLDER && FOLDER/bin/pip install flwr
    python benchmarks/server_steps_against_flwr.py --flwr FOLDER/bin/python

Flower's FedAvgM is ours. Its FedYogi begins with v = 0, where Reddi et al. 2021 (algorithm 2) have
tau squared; it is compared as it is, and begun as in the paper. Its FedAdam corrects the bias by an
exponent of its own, which the paper has not: the difference is printed, and is no error of ours.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

from atoll.federation.step import STEPS, fresh_memory
from atoll.settings.federation import Rule

ROUNDS, FACILITIES, VALUES = 5, 3, 1000
RULE = {"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
PEER = """
import json, sys
import numpy as np
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.strategy import FedAdam, FedAvgM, FedYogi
given = json.load(sys.stdin)
r, deltas = given["rule"], np.array(given["deltas"])
start = [np.array(given["start"])]
adaptive = dict(eta=r["learning_rate"], beta_1=r["beta1"], beta_2=r["beta2"], tau=r["tau"])
first = ndarrays_to_parameters(start)
made = {
    "momentum": FedAvgM(initial_parameters=first, server_learning_rate=r["learning_rate"],
                        server_momentum=r["beta1"]),
    "adam": FedAdam(initial_parameters=first, **adaptive),
    "yogi": FedYogi(initial_parameters=first, **adaptive),
    "yogi, v from tau squared": FedYogi(initial_parameters=first, **adaptive),
}
made["yogi, v from tau squared"].v_t = [np.full_like(start[0], r["tau"] ** 2)]
values = {}
for name, strategy in made.items():
    model = start
    for number, round_deltas in enumerate(deltas):
        results = [
            (None, FitRes(Status(Code.OK, ""), ndarrays_to_parameters([model[0] + delta]), 1, {}))
            for delta in round_deltas
        ]
        model = parameters_to_ndarrays(strategy.aggregate_fit(number + 1, results, [])[0])
    values[name] = model[0].tolist()
print(json.dumps(values))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flwr", type=Path, required=True, help="a Python that has flwr")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    start = torch.randn(VALUES, dtype=torch.float64)
    deltas = 1e-2 * torch.randn(ROUNDS, FACILITIES, VALUES, dtype=torch.float64)
    given = {"rule": RULE, "start": start.tolist(), "deltas": deltas.tolist()}
    done = subprocess.run(
        [arguments.flwr, "-c", PEER], input=json.dumps(given), capture_output=True, text=True
    )
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return done.returncode
    for name, values in json.loads(done.stdout.splitlines()[-1]).items():
        mine = ours(name.split(",")[0], start, deltas)
        moved = (mine - start).abs().max()
        worst = (torch.tensor(values, dtype=torch.float64) - mine).abs().max()
        print(f"{name:26} largest difference {worst:.1e} of a step of {moved:.1e}")
    return 0


def ours(update: str, start: torch.Tensor, deltas: torch.Tensor) -> torch.Tensor:
    rule = Rule.model_validate(RULE | {"update": update, "weigh": "equal"})
    memory = {name: torch.full_like(start, begin) for name, begin in fresh_memory(rule).items()}
    model = start.clone()
    for round_deltas in deltas:
        model += STEPS[update](round_deltas.mean(0), memory, rule)
    return model


if __name__ == "__main__":
    sys.exit(main())
