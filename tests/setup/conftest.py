"""What several tests of this folder install."""

import subprocess
import sys
from pathlib import Path

import pytest

TRANSFORMERS_4 = ("transformers==4.57.6", "tokenizers==0.22.2", "huggingface-hub==0.36.2")


@pytest.fixture(scope="session")
def transformers_4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with transformers 4: torch is this one's, all that changed is its own."""
    folder = tmp_path_factory.mktemp("transformers-4")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, *TRANSFORMERS_4], check=True)
    return folder
