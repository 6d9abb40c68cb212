#!/bin/bash
# What every image must be able to do before it is kept: import what a rank imports, and compose.
set -euo pipefail
cd /tmp
python3 - <<'PYTHON'
import bitsandbytes, datasets, hydra, safetensors, torch, transformers

import atoll.train.train

print("torch", torch.__version__, "transformers", transformers.__version__)
assert (torch.ones(2) @ torch.ones(2)).item() == 2
PYTHON
python3 -m atoll compose facility=laptop > /dev/null
