"""The wheel: nothing but vlmrl in it, and the README's own env trains from it, elsewhere, with no change here."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of what a wheel is made of, so that the repository stays clean."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "vlmrl", "datasets", "envs"):
        subprocess.run(["cp", "-r", ROOT / name, source / name], check=True)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """A folder with nothing but the installed wheel."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", folder, wheel]
    subprocess.run(command, check=True)
    return folder


def test_only_vlmrl_lands_in_site_packages(wheel, site):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"vlmrl"}
    assert {"vlmrl/multimodal/templates/chatml.jinja", "vlmrl/py.typed"} <= set(names)
    assets = [path for path in (ROOT / "vlmrl").rglob("*") if path.suffix in (".js", ".css", ".html")]
    assert {str(path.relative_to(ROOT)) for path in assets} <= set(names), "a file is missing from pyproject.toml"
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "vlmrl").rglob("*.py")}
    assert modules <= set(names), "a package is missing from pyproject.toml"
    assert {path.name.split("-")[0] for path in site.iterdir()} <= {"vlmrl", "bin"}


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_readmes_env_trains_from_another_folder(site, tmp_path):
    env, recipe, *_ = blocks("python")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/guess.py").write_text(env)
    (tmp_path / "mine/recipe.py").write_text(recipe)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [
        sys.executable,
        "-m",
        "vlmrl",
        "train",
        "../mine/recipe.py",
        "--train.steps",
        "1",
        "--warm-start.steps",
        "2",
    ]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "GuessEnv, at most 2 turns" in done.stdout
    assert (elsewhere / "runs/guess/trajectories.html").exists()
    where = subprocess.run(
        [sys.executable, "-c", "import vlmrl, datasets; print(vlmrl.__file__, datasets.__file__)"],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert where[0].startswith(str(site)) and "site-packages/datasets" in where[1]
