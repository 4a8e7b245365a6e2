"""A Gymnasium environment as an Env: frames, seeds, actions and endings."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from testing.episodes import a_task, image, play, play_audited

from vlmrl import GymnasiumEnv
from vlmrl.env.base import resolve_env

gymnasium = pytest.importorskip("gymnasium", reason="needs gymnasium: pip install 'vlmrl[gymnasium]'")


class Ramp(gymnasium.Env):
    """Its frame's brightness is what was added up; 100 ends it, and every step pays a tenth of the action."""

    def __init__(self, as_observation: bool = True):
        self.as_observation = as_observation
        self.closed = False
        self.canvas = np.zeros((32, 64, 3), np.uint8)

    def reset(self, *, seed=None, options=None):
        self.level = seed
        return self.render() if self.as_observation else self.level, {}

    def step(self, action):
        self.level += action
        seen = self.render() if self.as_observation else self.level
        return seen, action / 10, self.level >= 100, False, {"level": self.level}

    def render(self):
        self.canvas[:] = self.level
        return self.canvas

    def close(self):
        self.closed = True


class RampEnv(GymnasiumEnv):
    as_observation = True

    def make(self):
        return Ramp(self.as_observation)

    def read_actions(self, response):
        return [int(word) for word in response.split()]

    def describe(self, info):
        return f"level {info['level']}"


def frames(trajectory):
    return [[item.image.getpixel((5, 5)) for item in turn.media] for turn in trajectory.turns]


@pytest.mark.parametrize("as_observation", [True, False])
def test_each_response_is_an_action_and_the_next_frame_its_observation(as_observation: bool):
    class Seen(RampEnv):
        pass

    Seen.as_observation = as_observation
    trajectory = play_audited(Seen, ["10 20", "ten", "30", "20 60"], a_task("Climb.", seed=7))
    assert trajectory.turns[0].messages[0]["content"][0]["image"].image.getpixel((0, 0)) == (7, 7, 7)  # not drawn over
    assert frames(trajectory) == [[(7,) * 3], [(37,) * 3], [], [(67,) * 3]]
    assert trajectory.turns[0].messages[0]["content"][1] == {"type": "text", "text": "Climb."}
    assert trajectory.turns[1].messages[0]["content"][1] == {"type": "text", "text": "level 37"}
    assert "invalid literal for int" in trajectory.turns[2].messages[0]["content"]
    assert trajectory.turn_rewards == [3.0, 0.0, 3.0, 8.0]
    assert [turn.metrics["actions"] for turn in trajectory.turns] == [2, 0, 1, 2]
    assert (trajectory.ending, trajectory.reward) == ("env_done", 14.0)


@pytest.mark.slow
def test_frames_show_no_lines_of_other_episodes():
    """Acrobot, CartPole and others draw with pygame.gfxdraw. One in ten episodes had a wrong frame where eight played at once."""
    pytest.importorskip("pygame", reason="needs pygame: pip install 'vlmrl[gymnasium]'")

    class Acrobot(GymnasiumEnv):
        def make(self):
            return self.gymnasium.make("Acrobot-v1", render_mode="rgb_array")

        def read_actions(self, response):
            return [int(response)]

    def played(seed: int) -> list[bytes]:
        env = Acrobot(a_task(seed=seed))
        shown = [env.reset()[-1]["content"][0]["image"]]
        for action in "020201":
            shown += env.step(action)[0]["multi_modal_data"]["image"]
        env.close()
        return [each.tobytes() for each in shown]

    alone = [played(seed) for seed in range(5)]
    assert len(set(alone[0])) == 7
    with ThreadPoolExecutor(8) as threads:
        for number, frames in enumerate(threads.map(played, [0, 1, 2, 3, 4] * 40)):
            assert frames == alone[number % 5]


def test_actions_after_the_end_are_not_taken():
    assert play(RampEnv, ["100 50 50"]).turns[0].metrics["actions"] == 1


def test_a_response_without_actions_gets_an_error_message():
    trajectory = play(RampEnv, ["", "100"])
    assert trajectory.turns[1].messages[0]["content"] == "The response names no action."


@pytest.mark.parametrize("actions", [0, 1, np.array([0.5, 0.25])])
def test_actions_that_are_no_list_are_named(actions):
    """The action 0 counted as none, and the policy saw numpy's error about an array's truth value as its observation."""

    class Bare(RampEnv):
        def read_actions(self, response):
            return actions

    trajectory = play(Bare, ["1"], task=a_task())
    assert (
        trajectory.failed and "read_actions of Bare must return a list of actions, but it returned" in trajectory.error
    )


def test_an_episode_that_is_cut_off_keeps_its_rewards():
    trajectory = play(RampEnv, ["10", "10"], max_turns=2)
    assert (trajectory.ending, trajectory.reward) == ("max_turns", 2.0)
    assert play(RampEnv, ["word " * 200], max_response_tokens=5).reward == 0.0


def test_the_image_comes_before_the_prompts_last_text():
    task = a_task("Climb.", [image("blue")], seed=7)
    env = resolve_env(RampEnv).build(task)
    kinds = [part["type"] for part in env.reset()[-1]["content"]]
    assert kinds == ["image", "image", "text"]
    env.close()
    assert env.gym.closed


def test_a_simulation_that_breaks_fails_its_trajectory_and_not_the_run():
    """A policy's actions may be what makes its rewards NaN."""

    class Broken(RampEnv):
        def make(self):
            gym = super().make()
            gym.step = lambda action: (gym.render(), float("nan"), False, False, {"level": 0})
            return gym

    trajectory = play(Broken, ["1"])
    assert trajectory.ending == "error"
    assert "the reward of Broken must be a number from -1e+15 to 1e+15, but it is nan" in trajectory.error


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_frame_is_gray_or_rgb_and_stacked_frames_are_rendered(channels: int):
    """Four gray frames in one array, as for Atari, were an image with transparency; one gray frame failed."""

    class Channels(RampEnv):
        def make(self):
            gym = super().make()
            gym.reset = lambda seed: (np.full((32, 64, channels), 200, np.uint8), {})
            gym.level, gym.canvas = 90, np.zeros((32, 64, 3), np.uint8)
            return gym

    shown = play(Channels, ["30"]).turns[0].media[0].image
    assert shown.getpixel((5, 5)) == ((90,) * 3 if channels == 4 else (200,) * 3)


def test_an_environment_without_frames_is_named():
    class Blind(RampEnv):
        as_observation = False

        def make(self):
            gym = super().make()
            gym.render = lambda: None
            return gym

    trajectory = play(Blind, ["1"])
    assert "Blind: render() must return an array, but it returned None" in trajectory.error
