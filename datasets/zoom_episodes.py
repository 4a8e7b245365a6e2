"""Recorded episodes of the quickstart's task as conversations, for `recipes/sft_tiny.py`.

    python datasets/zoom_episodes.py runs/zoom_episodes
    python datasets/zoom_episodes.py runs/zoom_solved --min-reward 1      # only those that were solved

Its scripted function plays the episodes: the right zoom, then an answer that is right 42 times in a hundred. The folder has the form
that `vlmrl collect` writes: `episodes.jsonl`, and images by their content in `images/`.
"""

import asyncio
import json
import sys
from pathlib import Path

import tyro

from vlmrl import Data, Model, Rollout, Trajectory
from vlmrl.parts import Runner, ScriptedEngine, TurnLoop, load_model, load_tasks, resolve_env

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "recipes"))
from quickstart import demonstrate  # noqa: E402


def conversation(trajectory: Trajectory, images: Path) -> dict:
    """The episode as messages in OpenAI's form. Each distinct image is written once."""
    messages = []
    for turn in trajectory.turns:
        media = iter(turn.media)
        for message in turn.messages:
            parts = message["content"]
            if not isinstance(parts, str):
                parts = [image_part(next(media), images) if part["type"] == "image" else part for part in parts]
            messages.append(message | {"content": parts})
        messages.append({"role": "assistant", "content": turn.text})
    return {"id": trajectory.task.id, "messages": messages, "reward": trajectory.reward, "ending": trajectory.ending}


def image_part(item, images: Path) -> dict:
    """The part of a message that names the file of an image."""
    path = images / f"{item.id}.png"
    if not path.exists():
        item.image.save(path)
    return {"type": "image", "image": f"images/{path.name}"}


def main(out: tyro.conf.Positional[Path], episodes: int = 200, seed: int = 0, min_reward: float = 0.0) -> None:
    """Record the first episodes of the quickstart's training tasks into the folder ``out``, and of them those of ``min_reward``."""
    tasks = load_tasks(Data(generator=str(ROOT / "datasets/shapes.py:make_task"), size=episodes, seed=seed))
    options = {"coarse": 32, "crop": 32, "tools_in_prompt": False}
    env = resolve_env(str(ROOT / "envs/zoom.py:ZoomEnv"), options=options)
    model = load_model(Model(path="tiny:qwen3_vl", device="cpu"), Path("runs/.models"), seed)
    playing = {f"record/{index:05d}/00": tasks[index] for index in range(episodes)}
    script = ScriptedEngine(lambda request, turn: demonstrate(playing[request.trajectory_id], turn), model.renderer)
    rollout = Rollout(max_turns=2, max_tokens=256, max_response_tokens=48)
    turn_loop = TurnLoop(env, script, model.renderer, model.new_store(), rollout, seed)
    rollouts = asyncio.run(Runner(turn_loop, group_size=1).play(iter(playing.values()), episodes, "record"))
    images = out / "images"
    images.mkdir(parents=True, exist_ok=True)
    kept = [each for each in rollouts.trajectories if each.reward is not None and each.reward >= min_reward]
    rows = [json.dumps(conversation(trajectory, images)) for trajectory in kept]
    (out / "episodes.jsonl").write_text("\n".join(rows) + "\n")
    print(f"{len(rows)} of {episodes} episodes are in {out / 'episodes.jsonl'}")


if __name__ == "__main__":
    tyro.cli(main)
