"""Loading the code of a config, and resolving its paths against the recipe's folder."""

from __future__ import annotations

import functools
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from vlmrl import Algo, Config, Data, Eval, EvalData, Gateway, Model, Part, Rollout, WarmStart
from vlmrl.algos.choose import BUILT_IN, choose, choose_all
from vlmrl.config import code as code_module
from vlmrl.config.code import (
    code_path,
    forget_changed_files,
    load_object,
    places,
    resolve_config,
    resolve_function,
    resolve_path,
)
from vlmrl.utils.require import import_extra


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_resolve_path_takes_the_folder_before_the_working_directory(tmp_path, monkeypatch):
    first = write(tmp_path / "recipes" / "a.txt", "recipe")
    second = write(tmp_path / "work" / "a.txt", "work")
    only = write(tmp_path / "work" / "b.txt", "work")
    monkeypatch.chdir(tmp_path / "work")
    assert resolve_path("a.txt", tmp_path / "recipes") == first
    assert resolve_path("a.txt") == second
    assert resolve_path("b.txt", tmp_path / "recipes") == only
    assert resolve_path(first, tmp_path / "nowhere") == first


def test_resolve_path_names_every_place_it_looked_at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="Looked at: ") as error:
        resolve_path("c.txt", tmp_path / "recipes")
    assert str(tmp_path / "recipes" / "c.txt") in str(error.value)
    assert str(tmp_path / "c.txt") in str(error.value)


def test_places_names_one_place_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert places("c.txt", tmp_path) == [tmp_path / "c.txt"]
    assert places("/c.txt", tmp_path) == [Path("/c.txt")]


def test_load_object_from_a_module():
    assert load_object("pathlib:Path") is Path
    assert load_object("pathlib:Path.cwd")() == Path.cwd()


def test_load_object_from_a_file_runs_it_once(tmp_path):
    write(tmp_path / "thing.py", "class A:\n    pass\n\nb = 3\n")
    first = load_object("thing.py:A", tmp_path)
    assert load_object(f"{tmp_path}/thing.py:A") is first
    assert load_object("thing.py:b", tmp_path) == 3
    assert sys.modules[first.__module__].A is first
    assert "thing" not in sys.modules


def test_a_file_that_has_changed_is_run_again_where_that_is_asked_for(tmp_path):
    """Between two trainings in a notebook, and not in the middle of one."""
    write(tmp_path / "same.py", "class A:\n    pass\n")
    write(tmp_path / "edited.py", "b = 3\n")
    kept = load_object("same.py:A", tmp_path)
    assert load_object("edited.py:b", tmp_path) == 3
    write(tmp_path / "edited.py", "b = 4\n")
    assert load_object("edited.py:b", tmp_path) == 3
    forget_changed_files()
    assert load_object("edited.py:b", tmp_path) == 4
    assert load_object("same.py:A", tmp_path) is kept
    (tmp_path / "edited.py").unlink()
    forget_changed_files()
    with pytest.raises(ValueError, match=r"'edited.py' does not exist"):
        load_object("edited.py:b", tmp_path)


def test_files_of_one_name_in_two_folders_do_not_meet(tmp_path):
    write(tmp_path / "x" / "env.py", "NAME = 'x'\n")
    write(tmp_path / "y" / "env.py", "NAME = 'y'\n")
    assert [load_object("env.py:NAME", tmp_path / folder) for folder in "xy"] == ["x", "y"]


def test_a_file_with_a_dataclass_under_postponed_annotations_loads(tmp_path):
    text = "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass D:\n    a: int = 4\n"
    write(tmp_path / "d.py", text)
    assert load_object("d.py:D", tmp_path)().a == 4


@pytest.mark.parametrize("spec", ["thing", "thing.py", ":A", "thing.py:", ""])
def test_a_spec_without_both_parts_is_refused(spec):
    with pytest.raises(ValueError, match="module:name"):
        load_object(spec)


def test_a_missing_name_lists_close_ones(tmp_path):
    write(tmp_path / "e.py", "class SearchEnv:\n    pass\n\nclass Other:\n    pass\n")
    with pytest.raises(ValueError, match=r"has no 'SerchEnv'. Close names: SearchEnv$"):
        load_object("e.py:SerchEnv", tmp_path)
    with pytest.raises(ValueError, match=r"It has: Other, SearchEnv$"):
        load_object("e.py:zzz", tmp_path)


def test_an_import_error_keeps_its_cause_and_leaves_no_module(tmp_path):
    path = write(tmp_path / "bad.py", "1 / 0\n")
    before = set(sys.modules)
    with pytest.raises(ValueError, match="ZeroDivisionError: division by zero") as error:
        load_object("bad.py:A", tmp_path)
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert not {name for name in set(sys.modules) - before if name.startswith("vlmrl_file_")}
    # Mended: the next load runs it again; of another size, since Python may have kept the compiled file.
    path.write_text("A = 123\n")
    assert load_object("bad.py:A", tmp_path) == 123


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_such_module_here:A", "importing 'no_such_module_here' raised ModuleNotFoundError"),
        ("envs/geo3k:Geo3kEnv", r"ends in \.py"),
        ("datasets.geo3k:make", r"Hugging Face's package.*datasets/geo3k\.py:make"),
    ],
)
def test_a_module_that_is_none_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        load_object(spec)


def test_a_missing_optional_package_names_its_extra():
    with pytest.raises(ValueError, match=r"no_such_package is not installed .* pip install 'vlmrl\[games\]'"):
        import_extra("no_such_package", "games")


CODE = """
class Env: pass
class Scaled:
    def __init__(self, scale): self.scale = scale
    def advantage(self, rewards, group_ids): return self.scale * rewards
def judge(text, task): return 1.0
def best(trajectories): return [0.0]
def tasks(index, seed): return {"prompt": "x"}
def newest(messages): return messages
def keep(trajectories, k=1): return True
def show(task, turn): return "x"
async def play(client, renderer, task): ...
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A recipe's folder with code, data, a template and a model; the working directory is another one."""
    folder = tmp_path / "recipes"
    write(folder / "mine.py", CODE)
    for name in ("rows.jsonl", "my.jinja", "model/config.json"):
        write(folder / name, "{}")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return folder


def test_code_becomes_its_object_and_paths_become_absolute(folder):
    mine = str(folder / "mine.py")
    config = resolve_config(
        Config(
            env="mine.py:Env",
            group_reward="mine.py:best",
            data=Data("rows.jsonl"),
            model=Model("model", chat_template="my.jinja"),
            rollout=Rollout(history="mine.py:newest"),
            algo=Algo(
                filters=("mine.py:keep", "zero_variance"), reduction="mine.py:best", options={"mine.py:keep.k": 2}
            ),
            eval=Eval(data=EvalData(generator="mine.py:tasks", size=1)),
            warm_start=WarmStart(demonstrate="mine.py:show"),
        ),
        folder,
    )
    assert config.env is load_object(f"{mine}:Env") and config.group_reward is load_object(f"{mine}:best")
    assert config.rollout.history == f"{mine}:newest" and config.algo.reduction == f"{mine}:best"
    assert config.eval.data.generator is load_object(f"{mine}:tasks")
    assert config.warm_start.demonstrate is load_object(f"{mine}:show")
    assert (config.data.path, config.model.path) == (str(folder / "rows.jsonl"), str(folder / "model"))
    assert config.model.chat_template == str(folder / "my.jinja")
    assert config.algo.filters == (f"{mine}:keep", "zero_variance") and config.algo.options_of(f"{mine}:keep") == {
        "k": 2
    }
    assert resolve_config(config) == config


def test_a_function_of_algo_stays_itself_where_its_name_would_load_another_one(folder, monkeypatch):
    """A second execution of the main program has globals of its own: a sweep that sets one would train with the first value."""
    program = ModuleType("__main__")
    program.__file__ = str(
        write(folder / "sweep.py", "SCALE = 1.0\ndef mine(rewards, group_ids):\n    return SCALE * rewards\n")
    )
    exec(Path(program.__file__).read_text(), vars(program))
    monkeypatch.setitem(sys.modules, "__main__", program)
    assert resolve_config(Config(algo=Algo(advantage=program.mine))).algo.advantage is program.mine
    assert folder / "sweep.py" not in [file for file, _ in code_module._executed.values()]

    judge = load_object(f"{folder}/mine.py:judge")
    wrapper = functools.wraps(judge)(lambda rewards, group_ids: judge(rewards, group_ids))
    scaled = load_object(f"{folder}/mine.py:Scaled")(2.0).advantage
    for code in (wrapper, scaled):
        assert resolve_config(Config(algo=Algo(advantage=code))).algo.advantage is code
    assert resolve_config(Config(algo=Algo(advantage=judge))).algo.advantage == f"{folder}/mine.py:judge"


def test_the_parts_of_a_mixture_are_resolved(folder):
    part = Part(data=Data("rows.jsonl"), eval_data=EvalData("rows.jsonl"), reward="mine.py:judge")
    resolved = resolve_config(Config(mixture={"a": part}), folder).mixture["a"]
    assert resolved.reward is load_object(f"{folder}/mine.py:judge")
    assert resolved.data.path == resolved.eval_data.path == str(folder / "rows.jsonl")


def test_every_built_in_function_may_be_named(folder):
    built_in = {setting: list(registry) for setting, (registry, _) in BUILT_IN.items()}
    built_in["advantage"].remove("none")  # it needs a teacher
    for setting in ("corrections", "filters"):
        built_in[setting] = [tuple(built_in[setting])]
    for setting, names in built_in.items():
        for name in names:
            config = Config(algo=Algo(**{setting: name}), output_dir=str(folder))
            assert resolve_config(config, folder) == config
            assert (choose_all if isinstance(name, tuple) else choose)(config.algo, setting)


def test_names_that_are_no_files_stay(folder):
    config = Config(
        data=Data("hiyouga/geometry3k"),
        model=Model("Qwen/Qwen3-VL-2B-Instruct", chat_template="chatml"),
        rollout=Rollout(history="last_turns"),
        algo=Algo(filters=("zero_variance",)),
        output_dir=str(folder),
    )
    assert resolve_config(config, folder) == config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(env="mine.py:Nobody"), r"^env: 'mine.py:Nobody': mine.py has no 'Nobody'"),
        (
            Config(mixture={"a": Part(data=Data("rows.jsonl"), env="x.py:E")}),
            r"^mixture\.a\.env: 'x.py' does not exist",
        ),
        (Config(rollout=Rollout(generate="mine:play")), r"^rollout\.generate: 'mine:play': importing 'mine' raised"),
        (Config(data=Data("gone.jsonl")), r"^data\.path 'gone.jsonl' does not exist\. Looked at: .*/recipes/gone"),
        (Config(model=Model(chat_template="gone.jinja")), r"'gone.jinja' does not exist"),
        (Config(algo=Algo(filters=("x.py:keep",))), r"'x.py' does not exist"),
    ],
)
def test_what_does_not_exist_is_named_with_its_setting(folder, config, message):
    with pytest.raises(ValueError, match=message):
        resolve_config(config, folder)


def test_resolve_function_takes_a_built_in_name_code_or_a_function(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert resolve_function("f", "abs", ["x"], registry={"abs": abs}) is abs
    assert resolve_function("f", "mine.py:judge", ["text", "task"]) is load_object("mine.py:judge")
    assert resolve_function("f", len, ["x"]) is len


def test_a_function_that_does_not_fit_is_named_with_its_signature(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=r"^reward must be callable as judge\(task\), but .* judge\(text, task\)"):
        resolve_function("reward", "mine.py:judge", ["task"])
    called = (
        r"^data\.generator must be callable as judge\(index, seed, part\), but its signature is judge\(text, task\)"
    )
    with pytest.raises(ValueError, match=called):
        resolve_function("data.generator", "mine.py:judge", ["index", "seed", "part"], {}, options_field="data.options")
    with pytest.raises(ValueError, match=r"^algo.options do not fit keep: .* 'n'; .* keep\(trajectories, k=1\)\.$"):
        resolve_function("algo.filters", "mine.py:keep", ["group"], {"n": 1}, options_field="algo.options")
    with pytest.raises(
        ValueError, match=r"f must be one of abs, min, or code such as file\.py:function, but it is 'mni'"
    ):
        resolve_function("f", "mni", ["x"], registry={"min": min, "abs": abs})
    with pytest.raises(ValueError, match=r"^reward must be a function \(text, task\), but it is 3\.$"):
        resolve_function("reward", 3, ["text", "task"])


def test_code_path_names_the_file_so_that_it_can_be_loaded_again(folder):
    env = load_object(f"{folder}/mine.py:Env")
    assert code_path(env) == f"{folder}/mine.py:Env" and load_object(code_path(env)) is env
    assert code_path(Path) == f"{Path.__module__}:Path"


def test_the_files_of_an_agents_command_are_absolute_and_links_stay(tmp_path, monkeypatch):
    """The Python of a virtual environment is a link; what it links to has other packages."""
    (tmp_path / "python").symlink_to(sys.executable)
    (tmp_path / "agent.py").write_text("")
    monkeypatch.chdir(tmp_path.parent)
    for python in ("python", f"{tmp_path}/python"):
        config = Config(agent=f"{python} agent.py -c 1", rollout=Rollout(samples="merged"))
        assert resolve_config(config, tmp_path).agent == f"{tmp_path}/python {tmp_path}/agent.py -c 1"


@pytest.mark.parametrize("script", ["echo " + "x" * 5000, "~nobody-has-this-name/agent; true"])
def test_words_of_an_agents_command_that_are_no_file_names_stay(script):
    command = shlex.join(["sh", "-c", script])
    assert resolve_config(Config(agent=command, rollout=Rollout(samples="merged"))).agent == command


def test_hosts_of_images_are_no_folders(folder):
    other_spellings = ("HTTP://Bücher.lan:80", "http://[0:0:0:0:0:0:0:1]")
    images = ("urls", "http://images.lan", "https://127.0.0.1:9000/", "http://[::1]:80", *other_spellings, "mine")
    (folder / "mine").mkdir()
    resolved = resolve_config(Config(gateway=Gateway(images=images)), folder).gateway
    assert resolved.images == (*images[:-1], str(folder / "mine"))
    assert resolved.image_hosts == ("*", "images.lan", "127.0.0.1:9000", "[::1]:80", "xn--bcher-kva.lan:80", "::1")
    assert resolved.image_folders == (str(folder / "mine"),)


@pytest.mark.parametrize(
    "address", ["http://a/b", "http://a?b", "http://", "http://*", "http://a:b", "http://a:", "http://[", "http://b@a"]
)
def test_an_address_of_images_that_would_open_more_than_it_says_is_refused(address):
    with pytest.raises(ValueError, match=r"gateway\.images must be .*http://HOST:PORT"):
        Gateway(images=(address,))
