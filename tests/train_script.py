"""A private training as a process of its own, to be killed, resumed and launched several times.

    python train_script.py OUTPUT_DIR RESULT [--resume] [--data-seed N] [--option NAME=JSON]...
                           [--kill-in PLACE:N]

Only here the key is fixed (FIXED_KEY), so that two runs can be compared bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import settings
import torch
from faults import kill_inside

from hf_dpkfc.mechanism.randomness import SecretKey

FIXED_KEY = SecretKey(bytes(range(32)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("output_dir")
    parser.add_argument("result", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--data-seed", type=int, default=0)
    parser.add_argument("--option", action="append", default=[])
    parser.add_argument("--kill-in", help="PLACE:N, a place of faults.py and which call of it")
    args = parser.parse_args()
    if args.kill_in:
        kill_inside(args.kill_in)
    SecretKey.generate = classmethod(lambda cls: FIXED_KEY)
    torch.set_num_threads(1)
    options = {n: json.loads(v) for n, v in (text.split("=", 1) for text in args.option)}
    model = settings.bert(dropout=0.0 if os.environ.get("NO_DROPOUT") else 0.1)
    trainer = settings.trainer(
        args.output_dir, model, settings.text_data(seed=args.data_seed), **options
    )
    trainer.train(resume_from_checkpoint=True if args.resume else None)
    if trainer.args.process_index == 0:
        result = {
            "weights": settings.weights(trainer.model).tolist(),
            "releases": trainer._num_releases,
            "step": trainer.state.global_step,
            "epsilon": trainer.epsilon_spent(),
            "fingerprint": trainer.preconditioner.fingerprint,
        }
        args.result.write_text(json.dumps(result))
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
