"""Running tests/train_script.py: whole, killed, and on several processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).with_name("train_script.py")


def command(folder, *flags, options=None, launcher=(sys.executable,)):
    given = [f"--option={name}={json.dumps(value)}" for name, value in (options or {}).items()]
    return [*launcher, str(SCRIPT), str(folder), str(folder) + ".json", *flags, *given]


def run(folder, *flags, options=None, launcher=(sys.executable,)):
    """Train to the end; the result, or the error's text."""
    process = subprocess.run(
        command(folder, *flags, options=options, launcher=launcher),
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        timeout=300,  # processes that wait for each other would wait forever
    )
    if process.returncode:
        return process.stderr
    return json.loads(Path(str(folder) + ".json").read_text()) | {"stderr": process.stderr}


def run_until_killed(folder, place, options=None):
    """Train with a kill -9 planted inside a write; True if it struck."""
    process = subprocess.run(
        command(folder, f"--kill-in={place}", options=options), capture_output=True, text=True
    )
    return process.returncode == -signal.SIGKILL


def ledger_lines(folder):
    """Whole lines of a run's ledger, the header among them."""
    ledger = Path(folder) / "privacy_ledger.jsonl"
    return ledger.read_bytes().count(b"\n") if ledger.exists() else 0


def run_and_kill(folder, *flags, lines, delay, options=None):
    """Train, and kill -9 a moment after the ledger has that many lines; True if it was killed."""
    process = subprocess.Popen(
        command(folder, *flags, options=options),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None:
        if ledger_lines(folder) >= lines:
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
            process.wait()
            return process.returncode == -signal.SIGKILL
        time.sleep(0.002)
    return False
