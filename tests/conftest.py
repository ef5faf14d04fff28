"""Settings that must stand before torch and huggingface_hub are imported."""

import os
import tempfile

import mutants
import pytest
from hub_server import TOKEN, HubServer

# A planted bug, if tests/test_mutants.py asks for one; before the package is imported.
mutants.plant(os.environ.get(mutants.VARIABLE))

# Some virtual machines announce AMX and trap when it is used: bf16 tests would kill the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Models here are tiny: threads cost more than they give, and the cores run tests side by side.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The only Hub that tests can reach is our own, on loopback; the client reads this at import.
_HUB = HubServer().__enter__()
os.environ.update(
    HF_ENDPOINT=_HUB.endpoint,
    HF_HOME=tempfile.mkdtemp(prefix="hf_dpkfc-tests-"),
    HF_HUB_DISABLE_XET="1",
    HF_HUB_DISABLE_TELEMETRY="1",
)
os.environ.pop("HF_HUB_OFFLINE", None)


@pytest.fixture(autouse=True)
def private_state(tmp_path_factory, monkeypatch):
    """Keys of test runs lie in a temporary folder, never in the developer's home."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


@pytest.fixture
def hub(monkeypatch):
    """An empty Hub and a token for it."""
    _HUB.repos.clear()
    _HUB.objects.clear()
    _HUB.faults.clear()
    _HUB.requests.clear()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return _HUB


@pytest.fixture
def figure(record_property):
    """A number that this test measured, for tests/SCOREBOARD.md."""
    return lambda text: record_property("figure", text)
