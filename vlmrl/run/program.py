"""A training run as a program: its folder, plan, progress and report."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from vlmrl.algos.choose import note_on_reduction
from vlmrl.cluster import is_rank, receive_signals
from vlmrl.config import Cluster, Config, name_of
from vlmrl.config.checks import refuse_if
from vlmrl.config.fields import short_name
from vlmrl.data import TaskMixture, Tasks
from vlmrl.families.base import WHY_NOT_PACKED
from vlmrl.model import tiny
from vlmrl.plan.memory_plan import plan_memory
from vlmrl.report.advisories import PAGE
from vlmrl.report.crash import crash_report
from vlmrl.report.launch_command import as_program, resume_command, write_command
from vlmrl.report.progress import RunProgress
from vlmrl.report.records import flat, plain
from vlmrl.report.run_log import OnRow, RunLog
from vlmrl.report.trackers import Status, open_trackers
from vlmrl.run import loop
from vlmrl.run.build import NO_TASKS, Run, build_run, check_names
from vlmrl.run.off_policy import describe_correction
from vlmrl.run.run_folder import (
    check_is_no_other,
    check_models_elsewhere,
    check_resume,
    describe_changed_rows,
    describe_changes,
    earlier_run_set_aside,
    has_finished,
    trained_steps,
)
from vlmrl.run.run_lock import run_lock
from vlmrl.run.sft import step_draws
from vlmrl.run.stopping import GRACE_SECONDS, RunStopped, StopRequest, stop_on_signals
from vlmrl.train.controller import Commands, join_process_group, run_commands
from vlmrl.train.fsdp import backend_of
from vlmrl.train.rank import Rank
from vlmrl.train.ranks import Ranks
from vlmrl.utils.output_files import output_errors
from vlmrl.utils.threads import DaemonPool, run_awake
from vlmrl.utils.users_line import describe_error

FIRST_TASKS = 2  # that a dry run makes


def run_training(
    config: Config,
    *,
    dry_run: bool = False,
    resume: bool = False,
    command: Sequence[str] | None = None,
    stop: StopRequest | None = None,
    on_row: OnRow | None = None,
) -> Run | None:
    """Build and train, then print where the results are.

    Ctrl-C, SIGTERM and SIGHUP save the state of the last finished step and exit with 130, 143 or 129. ``resume`` continues an earlier
    run of this name from its newest checkpoint; otherwise the earlier run's folder is renamed. ``command`` is the command line of
    this program, kept in the folder: the one that continues the run is printed. With `cluster`, Ray runs it on each rank, and this
    process waits. With ``stop``, the caller stops the run, and its end is no exit. ``on_row`` gets each row of metrics. Rank 0
    returns the run.
    """
    if config.cluster.on and not dry_run and not is_rank():
        _launch(config, command)
        return None
    if is_rank():
        receive_signals()
    check_names(config)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if config.deterministic:
        # MKL's AVX2 kernels round by the alignment of their inputs, unless strict mode is set before the first of them runs.
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    with output_errors(config.models_dir):
        tiny.resolve(config.model.source, config.models_dir)  # before ranks are known: then only rank 0 builds models
    ranks = join_process_group(backend_of(torch.device("cuda" if torch.cuda.is_available() else "cpu")))
    if not dry_run:
        check_ranks(config, ranks)
    commands = Commands() if ranks.size > 1 else None
    is_program, stop, run = stop is None, stop or StopRequest(), None
    if ranks.rank == 0:
        progress = RunProgress()
        progress.say(str(plan_memory(config, ranks)))
        if dry_run:
            _without_weights(config, progress)
        else:
            check_models_elsewhere(config)
            with run_lock(config.folder):
                check_is_no_other(config.folder)
                run = build_run(config, ranks, commands)
                _train(run, progress, stop, resume, command, on_row)
    elif not dry_run:
        assert commands is not None
        with stop_on_signals(stop):  # rank 0 decides when to stop, and needs the others to save the checkpoint
            run_commands(Rank(config, ranks), commands)
    if commands is not None:
        if ranks.rank == 0 and not dry_run:
            commands.stop()
        commands.close()
    if stop.number is not None and is_program:
        raise SystemExit(128 + stop.number)
    return run


def check_ranks(config: Config, ranks: Ranks) -> None:
    """Raises ValueError on each rank if one has other settings of what all compute, as after another command line.

    They would wait for each other in different collectives, or add gradients of different models. Paths and devices may differ.
    """
    model = replace(config.model, path="-", device="-", chat_template=None)
    settings = {"model": model, "train": config.train, "deterministic": config.deterministic}
    first, *others = ranks.gather(flat(plain(settings)))
    for number, other in enumerate(others, start=1):
        for name in sorted(first.keys() | other.keys()):
            here, there = first.get(name), other.get(name)
            rule = f"the same on all ranks, but it is {here!r} on rank 0 and {there!r} on rank {number}"
            remedy = "start the same program with the same options on every machine"
            refuse_if(here != there, f"{name} must be {rule}: {remedy}.")


def _launch(config: Config, command: Sequence[str] | None) -> None:
    """Run ``command`` on all ranks of the cluster."""
    if command is None:
        raise ValueError(
            "cluster needs a program that every rank can run: start the recipe by `vlmrl train` or `vlmrl.main(config)`, or without "
            "cluster by torchrun."
        )
    if dist.is_torchelastic_launched():
        raise ValueError("cluster starts its own processes: run the recipe without torchrun.")
    try:
        from vlmrl.cluster.launch import launch
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ValueError("cluster needs Ray: pip install 'vlmrl[ray]'") from error
    launch(config, as_program(command))


def _train(
    run: Run,
    progress: RunProgress,
    stop: StopRequest,
    resume: bool,
    command: Sequence[str] | None,
    on_row: OnRow | None,
) -> None:
    """Train, and print the report, or how to continue a run that was stopped."""
    status: Status = "failed"
    began, log = time.monotonic(), None
    try:
        progress.say(summary_of(run))
        checkpoint = run.checkpoints.newest() if resume else None
        if resume and checkpoint is None:
            why = "" if run.config.checkpoint.every else " (checkpoint.every 0: only a stopped or failed run has one)"
            progress.say(f"resume    there is no checkpoint in {run.folder}{why}: the run starts at step 0")
        if checkpoint is not None and has_finished(run.config, checkpoint, run.held_out is not None):
            done = f"{trained_steps(run.folder)} of {run.config.train.steps} steps"
            progress.say(f"nothing is left to train: the run has {done}; raise train.steps")
            return
        log = _open_log(run, progress, checkpoint, command)
        log.on_row = on_row
        with (
            crash_report(run.folder, run.config, progress.say, RunStopped),
            stop_on_signals(stop, GRACE_SECONDS),
        ):
            summary = run_awake(loop.train(run, log, progress, checkpoint, stop))
    except RunStopped as stopped:
        status = "stopped"
        progress.say(f"\nstopped by {stopped} after {time.monotonic() - began:.0f} s; {_how_to_continue(run)}")
    except (KeyboardInterrupt, asyncio.CancelledError):  # outside of the main thread
        status = "stopped"
        progress.say(f"\nstopped after {time.monotonic() - began:.0f} s; the results so far are in {run.folder}")
        raise SystemExit(130) from None
    else:
        status, stop.number = "finished", None  # too late for a stop: the run is complete
        progress.say(report(run, summary, time.monotonic() - began))
    finally:
        run.close()
        if log is not None:
            log.close(status)  # last: it waits for trackers, which record how the run ended


def _open_log(run: Run, progress: RunProgress, checkpoint: Path | None, command: Sequence[str] | None) -> RunLog:
    """The log of a new run, or of one that continues. A resume that is refused changes no file.

    Nor does a tracker that does not start: trackers write into the folder, and so an earlier run is set aside for them, and put back.
    """
    config = run.config
    if checkpoint is not None:
        sizes = check_resume(config, checkpoint)
        log = _with_trackers(run, progress, sizes)
        changed = describe_changes(run.folder, config) + describe_changed_rows(checkpoint, run.contents)
        progress.say("\n".join([f"resumed   from {checkpoint}", *changed]))
    else:
        with earlier_run_set_aside(run.folder) as message:
            log = _with_trackers(run, progress, {})
        if message is not None:
            progress.say(message)
    log.write_config(config)
    if command is not None:
        write_command(run.folder, command)
    return log


def _with_trackers(run: Run, progress: RunProgress, sizes: Mapping[str, int]) -> RunLog:
    config = run.config
    return RunLog(run.folder, sizes, open_trackers(config.report.to, run.folder, plain(config), progress.say))


def _how_to_continue(run: Run) -> str:
    """Where the results of a stopped run are, and the command that continues it."""
    newest = run.checkpoints.newest()
    if newest is not None:
        command = resume_command(run.folder) or "the same program with resume"
        return f"its last checkpoint is {newest}. To continue:\n{command}"
    if not trained_steps(run.folder):
        model = run.folder / "model"  # of a warm start
        return f"the model so far is in {model}" if model.exists() else "nothing was saved yet"
    return f"the results so far are in {run.folder}. It cannot be continued: no checkpoint was saved."


def _without_weights(config: Config, progress: RunProgress) -> None:
    """Build the run without weights, in this process, to find errors and print the plan."""
    run = build_run(replace(config, model=replace(config.model, device="meta"), cluster=Cluster()))
    try:
        progress.say(summary_of(run))
        for tasks in (run.tasks, run.held_out or NO_TASKS):
            for problem in check_first_tasks(run, tasks):
                progress.say(f"warning   {problem}")
    finally:
        run.close()


def check_first_tasks(run: Run, tasks: Tasks) -> list[str]:
    """Make the first tasks and, if an env plays them, render their prompts. Returns what is wrong with them.

    Raises ValueError if none of them can be played.
    """
    numbers, problems = range(min(FIRST_TASKS, len(tasks))), []
    room, length, thread = run.config.rollout.max_tokens, run.prompt_length(), DaemonPool("data")

    def check(number: int) -> None:
        task = tasks.draw(number)
        # An empty one is the env's to give.
        most = max(room, tasks.limit_of(task) or 0)
        tokens = length.local(task, most)[0] if run.spec is not None and task.prompt else 0
        if room <= tokens <= (tasks.limit_of(task) or tokens):  # a run leaves out what is over the limit
            raise ValueError(
                f"task {task.id}: the prompt has {tokens} tokens or more, and rollout.max_tokens is {room}"
            )

    for number in numbers:
        try:
            thread.submit(check, number).result(run.config.rollout.env_timeout)
        except TimeoutError:
            problems.append(f"task {number} was not made in rollout.env_timeout ({run.config.rollout.env_timeout:g} s)")
            break
        except Exception as error:  # of a generator's code, the row, an image or the chat template
            problems.append(str(error) if isinstance(error, ValueError) else describe_error(error))
    thread.close()
    if problems and len(problems) == len(numbers):
        first = problems[0].removesuffix(".")
        raise ValueError(f"the first tasks cannot be played: {first}. `vlmrl data check` reads all.")
    return problems


def summary_of(run: Run) -> str:
    """The plan of the run, in a few lines."""
    config, policy = run.config, run.model.policy
    imitated, warm = "", config.warm_start
    if run.conversations is not None:
        rows, kept = run.conversations
        counts = f"{len(rows)} conversations, {len(kept or ())} held out"
        draws = step_draws(rows, config.sft.rows_per_step)
        steps, size = len(draws), max(map(len, draws))
        imitated = f"sft       {counts}; {steps} step{'s' * (steps != 1)} of {size}, lr {config.sft.lr:g}"
        imitated += "".join(
            f"\n          {name}: {note}" for name, part in rows.parts.items() for note in part.warnings
        )
    if config.only_sft:
        return f"{imitated}\noutput    {run.folder}"
    held_out = f", {len(run.held_out)} held out" if run.held_out is not None else ""
    sources = run.tasks.parts.values() if isinstance(run.tasks, TaskMixture) else [run.tasks]
    plays, turns = run.spec.name if run.spec else name_of(config.rollout.generate), config.rollout.max_turns
    if run.agents is not None:
        plays = f"agent {run.agents.spec.name}"
    scripted = f"{warm.steps} steps of {warm.trajectories_per_step} scripted trajectories, lr {warm.lr:g}"
    lines = [
        f"data      {len(run.tasks)} tasks{held_out}",
        *(f"warning   {warning}" for source in sources for warning in source.warnings),
        f"env       {plays}, at most {turns} turn{'s' * (turns != 1)} and {config.rollout.max_tokens} tokens",
        *([f"warmstart {scripted}"] if warm.steps else []),
        *([imitated] if imitated else []),
        *(_training(config) if config.train.steps else []),
    ]
    if run.serving is not None:
        lines.append(f"engine    {run.serving.plan()}")
    if not policy.family.may_share:
        reason = f"{policy.config.model_type} does not allow it, {WHY_NOT_PACKED}"
        lines.append(f"prefixes  not shared: {reason}")
    return "\n".join([*lines, f"output    {run.folder}"])


def _training(config: Config) -> list[str]:
    """The plan of the training steps."""
    train, group_size = config.train, config.rollout.group_size
    credit = "" if config.algo.credit == "trajectory" else f" (credit {short_name(config.algo.credit)})"
    lines = [
        f"training  {train.steps} step{'s' * (train.steps != 1)} of {train.groups_per_batch} groups x {group_size} = "
        f"{train.groups_per_batch * group_size} trajectories; {short_name(config.algo.advantage)}{credit} + "
        f"{short_name(config.algo.loss)}, lr {config.optim.lr:g}"
    ]
    warmup, steps = config.optim.warmup_steps, train.steps * train.steps_per_batch
    if warmup > steps:
        lines.append(f"warmup    {warmup} steps of {steps} (optim.warmup_steps): optim.lr is never reached")
    if group_size == 1 and config.algo.advantage == "grpo":
        lines.append(
            "warning   rollout.group_size is 1: each advantage is the reward itself, without the baseline of a group"
        )
    if note := note_on_reduction(config.algo):
        lines.append(f"loss      {note}")
    if (teacher := config.teacher).model is not None:
        sees = "what the policy saw" if teacher.sees is None else short_name(teacher.sees)
        lines.append(f"teacher   {teacher.model}, sees {sees}; {teacher.loss}, coefficient {teacher.coef:g}")
    if train.max_staleness:
        updates = f"{train.max_staleness} update{'s' * (train.max_staleness != 1)}"
        ahead = f"asynchronous, {updates} ahead at most; too old: {train.too_old}"
        lines.append(f"rollouts  {ahead}; {describe_correction(config)}")
    return lines


def report(run: Run, summary: dict[str, float], seconds: float) -> str:
    """The report at the end of a run: the rewards, and the files to open."""
    lines = [f"\ndone in {seconds:.0f} s"]
    titles = {"reward_before": "before", "reward_after": "after", "reward_blanked": "after, images blanked"}
    for key, title in titles.items():
        if key in summary:
            left_out = summary.get(f"{key}_tasks_left_out", 0)
            parts = [
                f"{part} {summary[f'{key}/{part}']:.3f}" for part in run.config.mixture if f"{key}/{part}" in summary
            ]
            passed = [
                f"{k.removeprefix(f'{key}_')} {v:.3f}" for k, v in summary.items() if k.startswith(f"{key}_pass@")
            ]
            notes = [f"{left_out:.0f} tasks left out"] * bool(left_out) + passed + parts
            note = f" ({', '.join(notes)})" if notes else ""
            lines.append(f"held-out reward {title}: {summary[key]:.3f} ± {summary[f'{key}_standard_error']:.3f}{note}")
    chance, error = run.config.eval.chance, summary.get("reward_blanked_standard_error", 0.0)
    if chance is not None and error > 0:
        off = abs(summary["reward_blanked"] - chance) / error
        lines.append(f"guessing would give {chance:.3f}: the blanked reward is {off:.1f} standard errors from it")
    after, after_error = (summary.get(f"reward_after{key}", math.nan) for key in ("", "_standard_error"))
    if chance and abs(after - chance) <= 2 * after_error:
        lines.append(
            f"the held-out reward after training is guessing, within two standard errors: see {PAGE}#starts_at_chance"
        )
    for name, title in {
        "reward.png": "curve",
        "trajectories.html": "trajectories",
        "metrics.jsonl": "metrics",
        "model": "model",
    }.items():
        if (run.folder / name).exists():
            lines.append(f"{title:<13} {run.folder / name}")
    lines.append(f"{'look at it':<13} vlmrl view {run.folder} --serve")
    return "\n".join(lines)
