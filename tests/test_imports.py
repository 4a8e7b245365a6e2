"""The import directions of the design, held over the syntax trees."""

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = [
    *(
        "types",
        "utils",
        "config",
        "algos",
        "families",
        "multimodal",
        "data",
        "env",
        "retrieval",
        "model",
        "weight_sync",
    ),
    *(
        "engine",
        "samples",
        "rollout",
        "train",
        "checks",
        "plan",
        "report",
        "cluster",
        "gateway",
        "run",
        "parts",
        "cli",
        "__main__",
    ),
]
"""The rooms of vlmrl/ in their one order: a room imports only rooms before it."""
FLOOR = {name: number for number, name in enumerate(ROOMS)}


def modules():
    return sorted(path for path in (ROOT / "vlmrl").rglob("*.py") if path != ROOT / "vlmrl/__init__.py")


def part_of(path: Path) -> str:
    return path.relative_to(ROOT / "vlmrl").parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Every module name that a file imports, at the top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {
                f"{node.module}.{alias.name}" if node.module == "vlmrl" else str(node.module) for alias in node.names
            }
    return names


def imported_modules(path: Path) -> set[str]:
    """As :func:`imported`, with the module that `from package import module` names."""
    found = imported(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_module_is_in_a_room():
    assert {part_of(path) for path in modules()} == set(ROOMS)


def test_a_room_imports_only_rooms_before_it():
    wrong = []
    for path in modules():
        for name in imported(path):
            if name.startswith("vlmrl.") and FLOOR[name.split(".")[1]] > FLOOR[part_of(path)]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_no_room_imports_the_parts():
    assert not [path for path in modules() if "vlmrl.parts" in imported(path)]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_no_circle_of_files():
    """Not even one of imports for type annotations: files that need each other's types belong together or need a third."""
    names = {module_name(path) for path in modules()}
    left = {module_name(path): imported_modules(path) & names - {module_name(path)} for path in modules()}
    while True:
        needed = set().union(*left.values())
        inside = {
            name: imports & left.keys() for name, imports in left.items() if imports & left.keys() and name in needed
        }
        if inside == left:
            break
        left = inside
    assert not left, f"these files import each other in a circle, or are between two circles: {sorted(left)}"


def test_rollout_and_train_never_meet():
    for path in modules():
        other = {"rollout": "vlmrl.train", "train": "vlmrl.rollout"}.get(part_of(path))
        assert other is None or not any(name.startswith(other) for name in imported(path)), path


def test_server_programs_and_ray_are_imported_in_one_folder_each():
    allowed = {"sglang": "vlmrl/engine/sglang/", "vllm": "vlmrl/engine/vllm/", "ray": "vlmrl/cluster/"}
    for path in modules():
        for name in imported(path):
            package = name.split(".")[0]
            assert package not in allowed or str(path.relative_to(ROOT)).startswith(allowed[package]), (
                f"{path} imports {name}"
            )


def test_types_need_only_numpy_torch_and_pil():
    outside = {name.split(".")[0] for name in imported(ROOT / "vlmrl/types.py")}
    assert outside <= {
        "__future__",
        "base64",
        "copy",
        "io",
        "collections",
        "dataclasses",
        "functools",
        "typing",
        "numpy",
        "torch",
        "PIL",
    }


def test_envs_import_only_public_names():
    for path in (ROOT / "envs").rglob("*.py"):
        assert not [name for name in imported(path) if name.startswith("vlmrl.") and name.count(".") > 1], path
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            assert not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vlmrl.")), path


def test_the_datasets_folder_is_no_package():
    assert not (ROOT / "datasets/__init__.py").exists()


DISTRIBUTIONS = {"PIL": "pillow", "faiss": "faiss-cpu", "openenv": "openenv-core", "mlflow": "mlflow-skinny"}
"""What installs a module of another name."""


def declared() -> set[str]:
    """Every distribution that pyproject.toml requires, in its dependencies or in an extra for users."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: lines for name, lines in project["optional-dependencies"].items() if name not in ("dev", "bench")}
    requirements = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
    return {re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in requirements}


def outside_packages(path: Path) -> set[str]:
    """Distributions that a file imports, also by `require("package", "extra")` or another call that names a package and its extra."""
    names = imported(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("require", "import_extra"):
            names |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else set()
    packages = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"vlmrl"}
    return {DISTRIBUTIONS.get(name, name.replace("_", "-")) for name in packages}


def test_what_is_imported_is_declared():
    wrong = {str(path.relative_to(ROOT)): outside_packages(path) - declared() for path in modules()}
    assert not {path: names for path, names in wrong.items() if names}


def test_what_is_declared_is_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.match(r"[\w.-]+", line)[0].lower() for line in project["dependencies"]}
    files = [*modules(), *(ROOT / "envs").rglob("*.py"), *(ROOT / "vlmrl/cli/starter").rglob("*.py.txt")]
    assert needed <= {name for path in files for name in outside_packages(path)}
