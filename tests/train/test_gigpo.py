"""GiGPO: advantages by state, by hand, against a plain implementation, and the states of played episodes."""

from __future__ import annotations

import asyncio
import random
import statistics

import pytest
import torch
from testing.agent_episodes import agent_episode, says
from testing.episodes import image
from testing.fakes import make_trajectory, make_turn

from vlmrl.algos.advantages import grpo
from vlmrl.algos.turn_credit import gigpo
from vlmrl.config import Algo, Config
from vlmrl.env.base import Env, EnvSpec, obs
from vlmrl.env.session import EnvContractError, EnvSession
from vlmrl.gateway.chat import ChatRequest
from vlmrl.samples import concat, step_wise
from vlmrl.train.credit import assign_advantages
from vlmrl.train.turn_states import states_of
from vlmrl.types import Task

PLAIN = {"grpo.scale_by_std": False}


def difference(rewards, groups):
    return grpo(rewards, groups, scale_by_std=False)


def test_two_episodes_that_meet_in_one_state_by_hand():
    """Totals 1 and 0: +-0.5. In state b, returns 1 and 0.5 * 0 = 0: +-0.5. In a, 0.5 * 1 and 0: +-0.25. State c is alone."""
    rewards, states = [[0.0, 1.0], [0.0, 0.0, 0.0]], [["a", "b"], ["a", "c", "b"]]
    found = gigpo(rewards, states, ["g", "g"], difference, discount=0.5, weight=2.0)
    assert found == [[1.0, 1.5], [-1.0, -0.5, -1.5]]
    assert gigpo(rewards, states, ["g", "other"], difference)[1] == [0.0, 0.0, 0.0]  # never compared over groups


def plain(rewards, states, groups, discount, weight):
    """Turn by turn, with lists, as the paper has it."""
    found = []
    for i, row in enumerate(rewards):
        totals = [sum(other) for other, group in zip(rewards, groups, strict=True) if group == groups[i]]
        episode = (
            (sum(row) - statistics.fmean(totals)) / (statistics.stdev(totals) + 1e-6) if len(totals) > 1 else sum(row)
        )
        found.append([])
        for t in range(len(row)):
            company = [
                sum(discount**k * reward for k, reward in enumerate(rewards[j][s:]))
                for j in range(len(rewards))
                for s in range(len(rewards[j]))
                if groups[j] == groups[i] and states[j][s] == states[i][t]
            ]
            step = 0.0
            if len(company) > 1:
                own = sum(discount**k * reward for k, reward in enumerate(row[t:]))
                step = (own - statistics.fmean(company)) / (statistics.stdev(company) + 1e-6)
            found[-1].append(episode + weight * step)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_random_groups_equal_a_plain_implementation(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 6) for _ in range(8)]
    rewards = [[rng.uniform(-1, 1) for _ in range(n)] for n in lengths]
    states = [[rng.choice("abcdef") for _ in range(n)] for n in lengths]
    groups = [rng.choice("xy") for _ in lengths]
    discount, weight = rng.choice([0.0, 0.9, 1.0]), rng.choice([0.5, 1.0])
    found = gigpo(rewards, states, groups, grpo, discount, weight)
    for row, expected in zip(found, plain(rewards, states, groups, discount, weight), strict=True):
        assert row == pytest.approx(expected, abs=2e-6)


def episode(name, states, reward):
    turns = [make_turn([1, 2], [5, 6], [-0.1, -0.2]) for _ in states]
    for turn, state in zip(turns, states[1:], strict=False):
        turn.next_state = state
    turns[0].messages = [{"role": "user", "content": f"task {states[0]}"}]
    return make_trajectory(name, turns=turns, final_reward=reward)


@pytest.mark.parametrize("form", [concat, step_wise])
def test_without_equal_states_it_is_grpo_exactly(form):
    trajectories = [episode("a", "kl", 1.0), episode("b", "mn", 0.0), episode("c", "o", 0.25)]
    rows = [[sample for each in trajectories for sample in form(each)] for _ in range(2)]
    metrics = assign_advantages(rows[0], trajectories, Config(algo=Algo(credit="gigpo")))
    assert metrics == {"credit/turns_compared": 0.0}
    assign_advantages(rows[1], trajectories, Config())
    for ours, plain_row in zip(*rows, strict=True):
        assert {a for a, mask in zip(ours.advantage, ours.loss_mask, strict=True) if mask} == {plain_row.advantage}


def test_turns_that_began_in_one_state_are_compared_in_the_rows():
    trajectories = [episode("a", "sx", 1.0), episode("b", "syx", 0.0)]
    samples = [sample for each in trajectories for sample in step_wise(each)]
    algo = Algo(credit="gigpo", options=PLAIN | {"gigpo.discount": 0.5})
    metrics = assign_advantages(samples, trajectories, Config(algo=algo))
    assert [sample.advantage[0] for sample in samples] == [0.75, 1.0, -0.75, -0.5, -1.0]
    assert metrics == {"credit/turns_compared": 0.8}


def test_the_last_observation_is_the_state_unless_the_env_names_one():
    def asked(text, **fields):
        turn = make_turn([1], [5], [-0.1], **fields)
        turn.messages = [{"role": "user", "content": text}]
        return turn

    same, other, rerendered = asked("door"), asked("wall"), asked("door")
    rerendered.messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "ok"}, *same.messages]
    keys = states_of(make_trajectory(turns=[same, other, rerendered]))
    assert keys[0] == keys[2] != keys[1]
    same.next_state = "3"
    named = states_of(make_trajectory(turns=[same, other]))
    assert named[1] != keys[1] and named[0] == keys[0]


def test_an_image_that_a_request_shares_with_an_earlier_one_is_part_of_its_state():
    """An agent that sends only what it sees now: its third request is the second again, whose image it keeps."""

    def states(*colors):
        episode = agent_episode([str(number) for number in range(len(colors))])

        async def act():
            for color in colors:
                await episode.complete(ChatRequest([says("user", "What now?", image(color))]))
            episode.finish()

        asyncio.run(act())
        assert [len(turn.media) for turn in episode.trajectory.turns] == [1, 1, 0]
        return states_of(episode.trajectory)

    red, blue, same = states("red", "blue", "blue")
    assert red != blue == same
    assert states("red", "green", "green")[2] != same


def test_requests_are_in_one_state_only_if_their_system_messages_are_the_same():
    """An agent that sends each observation alone after a system message, which the first request of a kind shows as new."""
    sent = [("plan", "A"), ("plan", "B"), ("plan", "A"), ("act", "A"), ("act", "B")]
    episode = agent_episode([str(number) for number in range(len(sent))])

    async def act():
        for system, observation in sent:
            await episode.complete(ChatRequest([says("system", system), says("user", observation)]))
        episode.finish()

    asyncio.run(act())
    states = states_of(episode.trajectory)
    texts = [int(turn.text[0]) for turn in episode.trajectory.turns]
    found = {
        sent[number]: {state for each, state in zip(texts, states, strict=True) if sent[each] == sent[number]}
        for number in texts
    }
    assert len(set(states)) == 4 and all(len(each) == 1 for each in found.values())


def test_turns_without_messages_began_in_the_state_that_their_new_tokens_show():
    keys = states_of(make_trajectory(turns=[make_turn(prompt, [5], [-0.1]) for prompt in ([1], [2], [1])]))
    assert keys[0] == keys[2] != keys[1]


class Named(Env):
    state: object = 7

    def step(self, response_text):
        return obs("on"), False, {"state": self.state, "reward": 1.0}


def step_of(env):
    async def play():
        session = EnvSession(EnvSpec("e", lambda _: env), Task("0", []), max_turns=3, timeout=600, max_retries=0)
        try:
            await session.start()
            return await session.step("go")
        finally:
            await session.close()

    return asyncio.run(play())


def test_a_state_that_an_env_names_is_no_metric():
    result = step_of(Named(Task("0", [])))
    assert result.state == "7" and result.metrics == {} and result.reward == 1.0


def test_a_state_that_is_no_name_is_refused():
    env = Named(Task("0", []))
    env.state = torch.zeros(3)
    with pytest.raises(EnvContractError, match=r"info\['state'\] must be a string or an integer, but it is tensor"):
        step_of(env)


def test_an_option_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"gigpo\.discount must be from 0 to 1, but it is 1\.5"):
        gigpo([[1.0]], [["a"]], ["g"], grpo, discount=1.5)


def test_a_function_of_the_recipe_gives_credit():
    def last_turn_only(rewards, states, group_ids, advantage):
        totals = advantage(torch.tensor([sum(row) for row in rewards], dtype=torch.float64), group_ids).tolist()
        return [[0.0] * (len(row) - 1) + [total] for total, row in zip(totals, rewards, strict=True)]

    trajectories = [episode("a", "sx", 1.0), episode("b", "sy", 0.0)]
    samples = [sample for each in trajectories for sample in step_wise(each)]
    assign_advantages(samples, trajectories, Config(algo=Algo(credit=last_turn_only, options=PLAIN)))
    assert [sample.advantage[0] for sample in samples] == [0.0, 0.5, 0.0, -0.5]
