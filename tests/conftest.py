"""Settings that must stand before torch and huggingface_hub are imported."""

import os

# Some virtual machines announce AMX and trap when it is used: bf16 tests would kill the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest


@pytest.fixture(autouse=True)
def private_state(tmp_path_factory, monkeypatch):
    """Keys of test runs lie in a temporary folder, never in the developer's home."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
