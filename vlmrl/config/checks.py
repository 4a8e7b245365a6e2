"""Rules between settings of different sections. Each function raises ValueError if the given sections violate one."""

from __future__ import annotations

from collections.abc import Mapping

from vlmrl.config.cluster import Cluster
from vlmrl.config.data import Data, EvalData, Part, check_held_out
from vlmrl.config.fields import short_name
from vlmrl.config.rollout import Rollout
from vlmrl.config.training import Algo, Teacher, Train
from vlmrl.utils.require import require

RENDERED = "re-rendered samples (rollout.history rerender with rollout.samples concat)"


def check_data(data: Data, eval_data: EvalData, mixture: Mapping[str, Part]) -> None:
    check_held_out("data", data, "eval.data", eval_data)
    refuse_if(bool(mixture) and data.is_set, "data and mixture exclude each other: make data a part of the mixture.")
    refuse_if(
        bool(mixture) and eval_data.is_set, "eval.data and mixture exclude each other: set mixture.NAME.eval_data."
    )
    for name in mixture:
        require(name.isidentifier(), "mixture", "named by identifiers", name)


def check_unread(data: Data, eval_data: EvalData, mixture: Mapping[str, Part]) -> None:
    """Refuse settings of data that nothing reads. Called when the tasks are loaded, since a recipe's options are set one by one."""
    if mixture:
        _refuse_changed(data, "with mixture, whose parts have their own: set mixture.NAME.data.")
    if not eval_data.is_set:
        other = "mixture.NAME.eval_data" if mixture else "data.held_out"
        _refuse_changed(eval_data, f"without eval.data.path and eval.data.generator: set one of them, or {other}.")
    named: dict[str, Data | EvalData] = {"data": data, "eval.data": eval_data}
    for name, part in mixture.items():
        named |= {f"mixture.{name}.data": part.data, f"mixture.{name}.eval_data": part.eval_data}
    for name, rows in named.items():
        sliced = rows.generator is not None and rows.split != "train"
        refuse_if(sliced, f"{name}.split must be unset with a generator: set {name}.size. It is {rows.split!r}.")
        unread = rows.generator is None and bool(rows.options)
        refuse_if(unread, f"{name}.options must be unset without a generator, whose arguments they are.")


def check_samples(algo: Algo, rollout: Rollout, train: Train) -> None:
    """Requirements of the algorithm on the form of the samples."""
    if rollout.needs_rendered_rows:
        rule = f"with {RENDERED}, which have no rollout logprobs: set rollout.samples to step_wise."
        refuse_if(bool(algo.corrections), f"algo.corrections must be unset {rule}")
        refuse_if(algo.old_policy == "rollout", f"algo.old_policy must not be rollout {rule}")
        refuse_if(algo.credit != "trajectory", f"algo.credit {short_name(algo.credit)} is not possible {rule}")
    if algo.credit != "trajectory":
        require(not train.shuffle_rewards, "train.shuffle_rewards", "False unless algo.credit is trajectory", True)


def check_rewards(algo: Algo, rollout: Rollout) -> None:
    """Requirements of the algorithm on groups, lengths and rewards."""
    if algo.advantage in ("rloo", "maxrl"):
        rule = f"2 or more with algo.advantage {algo.advantage}, where a group of one has advantage 0"
        require(rollout.group_size > 1, "rollout.group_size", rule, rollout.group_size)
    if algo.advantage == "maxrl":
        rule = "0 or more with algo.advantage maxrl, which takes no negative rewards"
        ok = rollout.truncated_reward is None or rollout.truncated_reward >= 0
        require(ok, "rollout.truncated_reward", rule, rollout.truncated_reward)
    limit = f"at most rollout.max_tokens ({rollout.max_tokens})"
    require(algo.overlong_buffer <= rollout.max_tokens, "algo.overlong_buffer", limit, algo.overlong_buffer)


def check_teacher(algo: Algo, teacher: Teacher, rollout: Rollout) -> None:
    """Requirements of the algorithm and the rollout on the teacher."""
    if algo.advantage == "none":
        rule = "set with algo.advantage none, which trains on no reward"
        require(teacher.model is not None or algo.kl_coef > 0, "teacher.model", rule, teacher.model)
    if teacher.model == "self":
        rule = "set with teacher.model self, which would agree with itself on what the policy saw"
        require(teacher.sees is not None, "teacher.sees", rule, teacher.sees)
    if teacher.model is not None and teacher.loss == "sampled":
        rule = "a policy-gradient loss with teacher.loss sampled, which adds to its advantages"
        require(algo.loss != "sft", "algo.loss", rule, algo.loss)
    if teacher.servers[0]:
        rule = "1 with servers as the teacher, which score given tokens at temperature 1"
        require(rollout.temperature == 1, "rollout.temperature", rule, rollout.temperature)


def check_order(rollout: Rollout, train: Train, deterministic: bool) -> None:
    """Settings that exclude ``deterministic``: the order in which groups finish is not reproducible."""
    if deterministic:
        require(rollout.over_sampling == 1, "rollout.over_sampling", "1 with deterministic", rollout.over_sampling)
        require(not train.max_staleness, "train.max_staleness", "0 with deterministic", train.max_staleness)


def check_asynchronous(algo: Algo, rollout: Rollout, train: Train, cluster: Cluster) -> None:
    """Settings that exclude asynchronous rollouts (``train.max_staleness`` above 0)."""
    if not train.max_staleness:
        return
    rule = "1 with train.max_staleness above 0: the trainer does not wait for stragglers"
    require(rollout.over_sampling == 1, "rollout.over_sampling", rule, rollout.over_sampling)
    rendered = train.too_old == "correct" and rollout.needs_rendered_rows
    refuse_if(
        rendered,
        f"train.too_old correct needs rollout logprobs, which {RENDERED} lack: set rollout.samples to step_wise.",
    )
    check_corrected(algo, rollout, train, loss_has_ratio=False if algo.loss == "reinforce" else None)
    rule = "False or unset with train.max_staleness above 0: engines sample during training, on GPUs of their own"
    require(not (cluster.gpus and cluster.colocate), "cluster.colocate", rule, cluster.colocate)


def check_corrected(algo: Algo, rollout: Rollout, train: Train, loss_has_ratio: bool | None) -> None:
    """Asynchronous rollouts need an off-policy correction, unless ``algo.old_policy`` is set.

    ``loss_has_ratio``: as the loss declares; ``None``: not known yet. The loss ``sft`` needs no correction.
    """
    if not train.max_staleness or algo.corrections or algo.old_policy or algo.loss == "sft":
        return
    anyway = "or set algo.old_policy trainer to train on them as they are"
    refuse_if(
        rollout.needs_rendered_rows,
        f"train.max_staleness above 0 trains on rollouts of older weights, and {RENDERED} have no rollout logprobs to correct that: "
        f"set rollout.samples to merged or step_wise, {anyway}.",
    )
    refuse_if(
        loss_has_ratio is False,
        f"algo.corrections must be set with algo.loss {short_name(algo.loss)} and train.max_staleness above 0: this loss has no ratio "
        f"that corrects for older weights. Set algo.corrections, choose a loss such as ppo, {anyway}.",
    )


def _refuse_changed(data: Data | EvalData, rule: str) -> None:
    """Raises ValueError if a setting of ``data``, which nothing reads, is not its default."""
    for name, value in vars(data).items():
        changed = value != getattr(type(data)(), name)
        refuse_if(changed, f"{data.section}.{name} must be unset {rule} It is {value!r}.")


def refuse_if(wrong: bool, message: str) -> None:
    """Raises ValueError with ``message`` if the settings are ``wrong``."""
    if wrong:
        raise ValueError(message)
