"""The functions that the settings of ``algo`` choose: built-in ones by name, others as code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from vlmrl.algos.advantages import ADVANTAGES, is_per_token
from vlmrl.algos.corrections import CORRECTIONS
from vlmrl.algos.filters import FILTERS
from vlmrl.algos.losses import LOSSES, reduction_of
from vlmrl.algos.reductions import REDUCTIONS
from vlmrl.algos.turn_credit import CREDIT
from vlmrl.config import Algo, name_of
from vlmrl.config.code import check_options, find_function

BUILT_IN: dict[str, tuple[Mapping[str, Callable[..., Any]], tuple[str, ...]]] = {
    "advantage": (ADVANTAGES, ("rewards", "group_ids")),
    "credit": (CREDIT, ("rewards", "states", "group_ids", "advantage")),
    "loss": (LOSSES, ("inputs",)),
    "reduction": (REDUCTIONS, ("loss_mask", "group_ids")),
    "corrections": (CORRECTIONS, ("old_logprobs", "rollout_logprobs", "loss_mask")),
    "filters": (FILTERS, ("trajectories",)),
}
"""For each setting of ``algo`` that names functions: the built-in ones, and the positional arguments of all of them."""

LOSS_TYPES = {"grpo": "sequence_mean", "dapo": "token_mean", "dr_grpo": "seq_mean_token_sum_norm"}
"""For each value of TRL's ``loss_type`` that differs from ppo in the reduction only: that reduction."""


def choose(algo: Algo, setting: str, code: str | Callable[..., Any] | None = None) -> partial[Any]:
    """The function that ``algo`` names, with its options bound: ``choose(algo, "loss")(inputs)``.

    ``code``: one of several ``corrections`` or ``filters``. ``.func`` is the function itself, with what it declares.

    Raises:
        ValueError: it does not exist, or its options do not fit its signature.
    """
    code = _code(algo, setting) if code is None else code
    built_in, parameters = BUILT_IN[setting]
    if setting == "loss" and code in LOSS_TYPES:
        raise ValueError(
            f"algo.loss {code!r} of TRL is algo.loss ppo with algo.reduction {LOSS_TYPES[code]}: set both."
        )
    function = find_function(f"algo.{setting}", code, parameters, built_in)
    arguments = len(parameters) + (setting == "advantage" and is_per_token(function))  # the mask of the tokens
    options = algo.options_of(code)
    check_options("algo.options", function, arguments, options)
    return partial(function, **options)


def _code(algo: Algo, setting: str) -> Any:
    """The value of ``setting``. An unset reduction is that of the loss's source."""
    if setting == "reduction" and algo.reduction is None:
        return reduction_of(choose(algo, "loss").func)
    return getattr(algo, setting)


def note_on_reduction(algo: Algo) -> str:
    """A line for the user where ``algo.reduction`` differs from that of the loss's source; otherwise empty."""
    source = reduction_of(choose(algo, "loss").func)
    if algo.reduction in (None, source):
        return ""
    return f"reduction {name_of(algo.reduction)}; the source of the loss {name_of(algo.loss)} has {source}"


def choose_all(algo: Algo, setting: str) -> list[partial[Any]]:
    """The functions of ``corrections`` or ``filters``, as by :func:`choose`."""
    return [choose(algo, setting, code) for code in getattr(algo, setting)]
