"""Shared by all tests: no network, one thread, and the folders of the checkout."""

import os
import sys
from pathlib import Path

# Before anything imports torch, transformers or wandb: they read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["MPLBACKEND"] = "Agg"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The design folder beside the checkout; tests against its cases are skipped where it does not exist."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("no shared folder beside the checkout")
    return folder


@pytest.fixture(scope="session")
def python() -> str:
    return sys.executable
