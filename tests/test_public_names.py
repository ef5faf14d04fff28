"""What ``import hf_dpkfc`` gives, and what it doesn't load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hf_dpkfc


@pytest.mark.parametrize("name", hf_dpkfc.__all__)
def test_a_public_name_imports(name):
    namespace = {}
    exec(f"from hf_dpkfc import {name}", namespace)
    assert namespace[name].__name__ == name
    assert name in dir(hf_dpkfc)


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'hf_dpkfc' has no attribute 'no_such_name'"):
        hf_dpkfc.no_such_name  # noqa: B018


def test_type_checkers_see_every_name_in_its_home():
    tree = ast.parse(Path(hf_dpkfc.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == {name: f"hf_dpkfc.{home}" for name, home in hf_dpkfc._HOME_OF.items()}
    assert sorted(seen) == sorted(hf_dpkfc.__all__)


def test_importing_the_package_does_not_import_torch():
    code = "import hf_dpkfc, sys; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
