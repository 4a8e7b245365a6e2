"""The reward of each turn of the env and the state in which it began, which `algo.credit` compares within a group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, takewhile

from vlmrl.multimodal.messages import images_of, parts_of_message
from vlmrl.types import MediaItem, Message, Trajectory, Turn


def places_of(trajectory: Trajectory) -> list[int]:
    """For each turn how many turns of the env came before it.

    A response that a history policy asked for, such as a summary, has the place and the advantage of the env's next turn. With a place
    of its own, members whose summaries came at different times would be compared at shifted turns, and it with the turn after it.
    """
    return list(accumulate((not turn.asked for turn in trajectory.turns), initial=0))[:-1]


def rewards_by_place(trajectory: Trajectory) -> list[float]:
    """The reward of each turn of the env."""
    places = places_of(trajectory)
    rewards = [0.0] * (places[-1] + 1)
    for place, reward in zip(places, rewards_by_turn(trajectory), strict=True):
        rewards[place] += reward
    return rewards


def states_by_place(trajectory: Trajectory) -> list[str]:
    """The state in which each turn of the env began."""
    pairs = zip(places_of(trajectory), states_of(trajectory), strict=True)
    return list(dict(pairs).values())  # of a place, the env's turn is the last


def rewards_by_turn(trajectory: Trajectory) -> list[float]:
    """The reward of each turn. The last one's includes the final reward and the group reward."""
    rewards = [reward or 0.0 for reward in trajectory.turn_rewards]
    rewards[-1] += sum(reward or 0.0 for reward in (trajectory.final_reward, trajectory.group_reward))
    return rewards


def states_of(trajectory: Trajectory) -> list[str]:
    """The state in which each turn began, equal within a group for equal states.

    The env's name for it (``info["state"]``), or else the last observation: the messages since the last response, or the new tokens of
    a turn without messages, with the content hashes of their images. The system message is part of it, also where a turn keeps it of
    another one.
    """
    names, systems, turns = list[str](), list[list[Message]](), trajectory.turns
    for turn, name in zip(turns, [None, *(turn.next_state for turn in turns)], strict=False):
        above = None if turn.parent is None else turns[turn.parent]
        continues = above is not None and turn.kept >= above.length - 1  # its messages are an observation
        own = [] if continues else list(takewhile(lambda message: message.get("role") == "system", turn.messages))
        systems.append(own or ([] if turn.parent is None else systems[turn.parent]))
        names.append(_observation(turn, systems[-1], len(own)) if name is None else f"state {name}")
    return names


def _observation(turn: Turn, system: Sequence[Message], own: int) -> str:
    """``own``: how many of the turn's messages are the ``system`` ones."""
    if not turn.messages:
        return repr((turn.prompt_ids, [item.id for item in turn.media]))
    responses = [place for place, message in enumerate(turn.messages) if message.get("role") == "assistant"]
    shown = [*system, *turn.messages[responses[-1] + 1 if responses else own :]]
    # Of the messages, since the turn may keep some of them of another one. A history policy may add images that are not loaded here.
    images = images_of(shown)
    images = images if all(isinstance(image, MediaItem) for image in images) else turn.media
    texts = [(message.get("role"), [part.get("text") for part in parts_of_message(message)]) for message in shown]
    return repr((texts, [item.id for item in images]))
