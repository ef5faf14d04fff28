"""Imports point one way, and each room keeps to its outside imports."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hf_dpkfc"

# Bottom to top: a room imports only from itself and from rooms named before it.
ROOMS = [
    "errors",
    "layers",
    "losses",
    "curvature",
    "mechanism",
    "privacy",
    "core",
    "optimizers",
    "global_state",
    "engine",
    "processes",
    "publishing",
    "runs",
    "tuning",
    "diagnostics",
    "publication",
    "config",
    "refusals",
    "loading",
    "callbacks",
    "trainer",
    "cli",
]
FORBIDDEN = {
    "errors": {"torch", "transformers", "datasets", "opacus", "numpy"},
    "layers": {"datasets", "accelerate"},
    "losses": {"datasets", "accelerate", "opacus"},
    "curvature": {"datasets", "accelerate", "opacus"},
    "mechanism": {"datasets", "accelerate", "opacus", "transformers"},
    "optimizers": {"datasets", "accelerate", "opacus", "transformers"},
    "privacy": {"torch", "numpy", "datasets", "transformers", "accelerate"},
}


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module)


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    allowed = set(ROOMS[: ROOMS.index(room_of(path)) + 1])
    used = {m.split(".")[1] for m in imported_modules(path) if m.startswith("hf_dpkfc.")}
    assert used <= allowed


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_rooms_keep_to_their_outside_imports(path):
    outside = {m.split(".")[0] for m in imported_modules(path)}
    assert not outside & FORBIDDEN.get(room_of(path), set())


def test_noise_is_drawn_in_one_place():
    callers = {room_of(p) for p in FILES if 'stream("noise")' in p.read_text()}
    assert callers == {"mechanism"}


def test_private_stream_never_uses_torchs_generators():
    for path in (PACKAGE / "mechanism").glob("*.py"):
        text = path.read_text()
        assert not any(name in text for name in ("torch.randn", "torch.rand(", "manual_seed"))


def test_every_public_name_imports():
    import hf_dpkfc

    assert all(hasattr(hf_dpkfc, name) for name in hf_dpkfc.__all__)
