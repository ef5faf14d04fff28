"""Places inside a write at which a training process kills itself, as kill -9 would."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from huggingface_hub import HfApi
from transformers import TrainerState

from hf_dpkfc.curvature.preconditioner import Preconditioner
from hf_dpkfc.privacy.ledger import PrivacyLedger


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def half_a_ledger_line(ledger, entry):
    ledger._file.write(str(entry).encode()[:30])
    ledger._file.flush()
    die()


def half_a_preconditioner(maps, path):
    Path(path).write_bytes(bytes(100))
    die()


def half_a_trainer_state(state, path):
    Path(path).write_text('{"global_step": ')
    die()


# By name: the class and method inside which it happens, and what happens there instead.
PLACES = {
    "ledger-line": (PrivacyLedger, "_write_line", half_a_ledger_line),
    "ledger-head": (PrivacyLedger, "_write_head", lambda *_: die()),
    "checkpoint-preconditioner": (Preconditioner, "save", half_a_preconditioner),
    "checkpoint-state": (TrainerState, "save_to_json", half_a_trainer_state),
    "push": (HfApi, "create_commit", lambda *_, **__: die()),
}


def kill_inside(place_and_call):
    """From the n-th call of a place on, the process is dead."""
    place, call = place_and_call.split(":")
    owner, name, fatal = PLACES[place]
    real, calls = getattr(owner, name), []

    def counted(*args, **kwargs):
        calls.append(1)
        return (fatal if len(calls) == int(call) else real)(*args, **kwargs)

    setattr(owner, name, counted)
