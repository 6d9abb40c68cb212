"""Exports read by transformers 4, which is installed for it in a folder of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import small_export
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

READ = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, __version__
assert __version__.startswith("4."), __version__
folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(folder)
ids = torch.arange(3, 203)[None]
with torch.no_grad():
    logits = model(input_ids=ids).logits[0, -1].tolist()
text = tokenizer("the lagoon<|turn|>")["input_ids"]
generation = GenerationConfig.from_pretrained(folder)
print(json.dumps([logits, text, tokenizer.all_special_tokens, generation.eos_token_id]))
"""


@pytest.mark.full
# not gpt_neox: transformers 5 calls its head otherwise
@pytest.mark.parametrize("family", [n for n in small_export.FAMILIES if n != "gpt_neox"])
def test_transformers_4_reads_the_same_model(
    family: str, tmp_path: Path, transformers_4: Path
) -> None:
    folder = small_export.exported(tmp_path, family)
    environment = os.environ | {"PYTHONPATH": str(transformers_4), "HF_HUB_OFFLINE": "1"}
    read = subprocess.run(
        [sys.executable, "-c", READ, str(folder)],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    logits, text, special, end = json.loads(read.stdout)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(input_ids=torch.arange(3, 203)[None]).logits[0, -1]
    torch.testing.assert_close(torch.tensor(logits), expected, atol=1e-5, rtol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert text == tokenizer("the lagoon<|turn|>")["input_ids"]
    assert set(special) == set(tokenizer.all_special_tokens)
    assert end == [1, 7]
