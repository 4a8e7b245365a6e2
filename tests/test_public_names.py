"""The names that recipes and environments import."""

import ast
import inspect
from pathlib import Path

import vlmrl
from vlmrl import config

ROOT = Path(__file__).parent.parent


def test_every_config_class_and_nothing_private_is_a_public_name():
    sections = {name for name, value in vars(config).items() if inspect.isclass(value)}
    assert len(sections) > 10 and sections <= set(vlmrl.__all__)
    assert dir(vlmrl) == sorted([*vlmrl.__all__, "__version__"])


def test_the_algorithm_on_one_page_imports_from_three_modules():
    tree = ast.parse((ROOT / "recipes/minimal_grpo.py").read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in modules if name.startswith("vlmrl")} == {"vlmrl", "vlmrl.algos", "vlmrl.parts"}
