"""The trainer against plain sums over single rows."""

import copy

import numpy as np
import pytest
import torch
from PIL import Image

from vlmrl.config import Algo, Model, Optim
from vlmrl.model import tiny
from vlmrl.model.loading import load_model
from vlmrl.model.policy import Policy
from vlmrl.train.master_weights import MasterWeights, move_state
from vlmrl.train.packing import collate, per_token, split
from vlmrl.train.trainer import Trainer, TrainerSpec, learning_rate_factor
from vlmrl.types import Sample
from vlmrl.utils.host_memory import HostMemory


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def model(request, tmp_path_factory):
    folder = tiny.build(tmp_path_factory.mktemp("model") / request.param, request.param)
    return load_model(Model(path=str(folder), device="cpu"), folder.parent, seed=0)


def sample(model, name, images, response, mask, group="g", advantage=1.0):
    """A row whose prompt shows images of the given sizes; ``response`` and ``mask`` as given."""
    store = model.new_store()
    media = [store.load(Image.effect_noise(size, 90).convert("RGB")) for size in images]
    prompt = [5, 6]
    for item in media:
        prompt += [model.policy.image_token_id] * item.num_tokens + [7]
    return Sample(
        prompt_token_ids=prompt,
        response_ids=response,
        loss_mask=mask,
        rollout_logprobs=[-1.0 * m for m in mask],
        policy_versions=[0] * len(response),
        group_id=group,
        trajectory_id=name,
        is_last_step=True,
        stop_reason="stop",
        media=media,
        advantage=advantage,
    )


def mixed_samples(model):
    """Text and images, long and short, two groups; the last row shows the first one's image again."""
    rows = [
        sample(model, "a", [(64, 96)], [10, 11, 12, 13], [1, 1, 0, 1], "g1", 1.0),
        sample(model, "b", [], [20, 21], [1, 1], "g1", -1.0),
        sample(model, "c", [(32, 32), (96, 64)], [30, 31, 32], [1, 0, 1], "g2", 0.5),
    ]
    again = sample(model, "d", [], [40], [1], "g2", -2.0)
    again.media = rows[0].media
    again.prompt_token_ids = rows[0].prompt_token_ids
    return [*rows, again]


def row_logprobs(model, row):
    """One row through Hugging Face's own forward, with its own positions: an independent reference."""
    policy = model.policy
    inner = policy.model.model
    kept, inner.get_image_features = inner.get_image_features, type(inner).get_image_features.__get__(inner)
    try:
        ids = torch.tensor([row.token_ids])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if row.media:
            inputs |= dict(model.image_processor(images=[item.image for item in row.media], return_tensors="pt"))
            inputs["mm_token_type_ids"] = (ids == policy.image_token_id).int()
            inner.rope_deltas = None
        logits = policy.model(**inputs).logits.float()[0]
    finally:
        inner.get_image_features = kept
    logits[:, policy.banned_ids] = -torch.inf
    logprobs = logits.log_softmax(-1)
    start = len(row.prompt_token_ids)
    return torch.stack([logprobs[start + i - 1, token] for i, token in enumerate(row.response_ids)])


def test_a_mixed_micro_batch_scores_each_row_as_if_alone(model):
    rows = mixed_samples(model)
    with torch.no_grad():
        batch = collate(rows, model.policy.family)
        scores = model.policy(batch)
        assert len(batch.images) == 3 and len(batch.image_order) == 4  # each distinct image once
        for index, row in enumerate(rows):
            start = len(row.prompt_token_ids)
            expected = row_logprobs(model, row)
            for place, mask in enumerate(row.loss_mask):
                got = scores.logprobs[index, start + place].item()
                assert got == pytest.approx(expected[place].item() if mask else 0.0, abs=2e-6)


def gradients(model, rows, tokens_per_micro_batch, algo=Algo()):  # noqa: B008 - it is frozen
    policy = model.policy
    policy.zero_grad()
    spec = TrainerSpec(algo, Optim(lr=1e-9), total_steps=1, tokens_per_micro_batch=tokens_per_micro_batch)
    trainer = Trainer(policy, spec)
    trainer._apply_gradient = lambda: {}  # keep the gradient
    output = trainer.step(rows)
    for row, logprobs in zip(rows, output.logprobs, strict=True):
        assert np.abs((row_logprobs(model, row).detach().numpy() - logprobs) * row.loss_mask).max() < 1e-5
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def test_the_gradient_is_that_of_the_formula(model):
    """At ratio 1 the PPO gradient is -sum over trained tokens of A * grad logprob / tokens."""
    rows = mixed_samples(model)
    got = gradients(model, rows, 10**6)
    model.policy.zero_grad()
    tokens = sum(sum(row.loss_mask) for row in rows)
    loss = sum(-(row_logprobs(model, row) * torch.tensor(row.loss_mask)).sum() * row.advantage / tokens for row in rows)
    loss.backward()
    for name, parameter in model.policy.named_parameters():
        assert (parameter.grad - got[name]).norm() <= 1e-4 * parameter.grad.norm() + 1e-7, name


def test_with_the_rollouts_policy_as_the_old_one_each_token_weighs_what_its_ratio_to_it_says(model):
    rows = mixed_samples(model)
    # Of the trainer's policy to the rollout's.
    log_ratios = [[0.1, 0.5, 0.0, -0.3], [-0.3, 0.1], [0.5, 0.0, 0.1], [-0.3]]
    for row, log_ratio in zip(rows, log_ratios, strict=True):
        moved = row_logprobs(model, row).detach() - torch.tensor(log_ratio)
        row.rollout_logprobs = [float(each) * mask for each, mask in zip(moved, row.loss_mask, strict=True)]
    algo = Algo(loss="cispo", options={"cispo.ratio_max": 1.3}, old_policy="rollout")
    got = gradients(model, rows, 40, algo)
    model.policy.zero_grad()
    tokens = sum(sum(row.loss_mask) for row in rows)
    for row, log_ratio in zip(rows, log_ratios, strict=True):
        weights = torch.tensor(log_ratio).exp().clamp(max=1.3) * torch.tensor(row.loss_mask) * row.advantage / tokens
        (-weights * row_logprobs(model, row)).sum().backward()
    for name, parameter in model.policy.named_parameters():
        assert (parameter.grad - got[name]).norm() <= 1e-4 * parameter.grad.norm() + 1e-7, name


@pytest.mark.parametrize("budget", [1, 10**6])
def test_a_row_without_rollout_logprobs_is_not_corrected_and_the_others_are(model, budget):
    rows = mixed_samples(model)
    for row in rows[:3]:  # each trained token was four times as likely in the rollout: the weight is 1/4
        moved = row_logprobs(model, row).detach() + np.log(4)
        row.rollout_logprobs = [float(each) * mask for each, mask in zip(moved, row.loss_mask, strict=True)]
    rows[3].rollout_logprobs = None
    got = gradients(model, rows, budget, Algo(corrections=("token_truncation",)))
    model.policy.zero_grad()
    tokens = sum(sum(row.loss_mask) for row in rows)
    for row, weight in zip(rows, [0.25, 0.25, 0.25, 1.0], strict=True):
        weights = weight * torch.tensor(row.loss_mask) * row.advantage / tokens
        (-weights * row_logprobs(model, row)).sum().backward()
    for name, parameter in model.policy.named_parameters():
        assert (parameter.grad - got[name]).norm() <= 1e-4 * parameter.grad.norm() + 1e-7, name


def test_the_metrics_of_the_mismatch_do_not_depend_on_micro_batches(model):
    """Each trained token was exp(number) times as likely in the rollout, with the row's number."""
    rows = mixed_samples(model)
    for number, row in enumerate(rows):
        moved = row_logprobs(model, row).detach() + number
        row.rollout_logprobs = [float(each) * mask for each, mask in zip(moved, row.loss_mask, strict=True)]
    before, algo, metrics = copy.deepcopy(model.policy.state_dict()), Algo(corrections=("token_truncation",)), []
    for budget in (1, 10**6):
        spec = TrainerSpec(algo, Optim(lr=1e-9), total_steps=1, tokens_per_micro_batch=budget)
        metrics.append(Trainer(model.policy, spec).step(rows).metrics)
        model.policy.load_state_dict(before)
    names = [name for name in metrics[0] if name.startswith(("mismatch/", "correction/"))]
    for name in names:
        assert metrics[0][name] == pytest.approx(metrics[1][name], rel=1e-3, abs=1e-5), name
    mean = sum(number * sum(row.loss_mask) for number, row in enumerate(rows)) / sum(sum(r.loss_mask) for r in rows)
    assert len(names) == 6 and metrics[0]["mismatch/perplexity_ratio"] == pytest.approx(np.exp(mean), rel=1e-3)


def test_tokens_that_cannot_be_corrected_are_counted(model):
    rows = mixed_samples(model)
    before = copy.deepcopy(model.policy.state_dict())
    rows[0].rollout_logprobs = None
    algo = Algo(corrections=("token_truncation",))
    trainer = Trainer(model.policy, TrainerSpec(algo, Optim(lr=1e-9), total_steps=1, tokens_per_micro_batch=10**6))
    assert trainer.step(rows).metrics["correction/uncorrected_tokens"] == 3.0
    model.policy.load_state_dict(before)


@pytest.mark.parametrize(("share", "shared"), [(True, 3.0), (False, 0.0)])
def test_tokens_of_rows_and_those_that_are_computed_once_are_counted(model, share, shared):
    rows = [sample(model, "a", [], [20, 21], [1, 1]), sample(model, "b", [], [20, 22, 23], [1, 0, 1])]
    before = copy.deepcopy(model.policy.state_dict())
    spec = TrainerSpec(Algo(), Optim(lr=1e-9), 1, tokens_per_micro_batch=10**6, share_prefixes=share)
    metrics = Trainer(model.policy, spec).step(rows).metrics
    model.policy.load_state_dict(before)
    assert (metrics["tokens"], metrics["row_tokens"], metrics["shared_tokens"]) == (4.0, 9.0, shared)


def test_a_batch_is_cut_into_optimizer_steps_by_groups(model):
    rows = mixed_samples(model)
    before = copy.deepcopy(model.policy.state_dict())
    spec = TrainerSpec(Algo(), Optim(lr=1e-4), total_steps=2, tokens_per_micro_batch=10**6, groups_per_step=1)
    output = Trainer(model.policy, spec).step(rows)
    assert output.steps_done == 2
    assert output.metrics["ratio"] != 1.0  # the second step is off the policy the old logprobs came from
    model.policy.load_state_dict(before)


def text_groups(model, count):
    return [sample(model, f"t{number}", [], [20, 21], [1, 1], f"g{number}") for number in range(count)]


@pytest.mark.parametrize(
    ("groups", "per_step", "sizes"),
    [
        (9, 4, [4, 5]),
        (5, 4, [5]),
        (7, 4, [3, 4]),
        (6, 4, [6]),
        (1, 4, [1]),
        (3, 2, [3]),
        (8, 4, [4, 4]),
        (3, 1, [1, 1, 1]),
    ],
)
def test_leftover_groups_take_no_optimizer_step_of_their_own(model, groups, per_step, sizes):
    rows = text_groups(model, groups)
    before = copy.deepcopy(model.policy.state_dict())
    options = {"tokens_per_micro_batch": 10**6, "groups_per_step": per_step}
    trainer = Trainer(model.policy, TrainerSpec(Algo(), Optim(lr=1e-9), total_steps=9, **options))
    trained, update = [], trainer._update
    trainer._update = lambda part, old: (trained.append([row.group_id for row in part]), update(part, old))[1]
    assert trainer.step(rows).steps_done == len(sizes)
    assert [len(part) for part in trained] == sizes
    assert [name for part in trained for name in part] == [row.group_id for row in rows]
    model.policy.load_state_dict(before)


def test_the_schedule_ends_with_the_last_batch_however_many_steps_were_left_out(model):
    """Four batches of two optimizer steps: the second has half of its groups, the third none."""
    before = copy.deepcopy(model.policy.state_dict())
    options = {"tokens_per_micro_batch": 10**6, "groups_per_step": 1, "total_steps": 8}
    trainer = Trainer(model.policy, TrainerSpec(Algo(), Optim(lr=8e-9, schedule="linear"), **options))
    rates, apply = [], trainer.optimizer.step
    trainer.optimizer.step = lambda: (rates.append(trainer.optimizer.param_groups[0]["lr"]), apply())
    for batch, groups in ((1, 2), (2, 1), (4, 2)):
        trainer.end_schedule_at(2 * batch)
        trainer.step(text_groups(model, groups))
    trainer.step(text_groups(model, 1))  # after the schedule's end
    assert rates == pytest.approx([8e-9, 7e-9, 5e-9, 2e-9, 1e-9, 0.0])  # as the last of each full batch
    model.policy.load_state_dict(before)


def test_the_warmup_counts_the_steps_that_were_taken():
    optim = Optim(lr=1.0, schedule="linear", warmup_steps=2)
    assert learning_rate_factor(optim, 0, 6, position=1) == pytest.approx(1 / 3)
    assert learning_rate_factor(optim, 1, 6, position=5) == pytest.approx(0.25)  # no later than the decay
    assert learning_rate_factor(optim, 3, 6, position=6) == 0.0


def test_logprobs_and_mismatch_are_of_the_weights_before_the_batch(model):
    rows = mixed_samples(model)
    before = copy.deepcopy(model.policy.state_dict())
    options = {"tokens_per_micro_batch": 10**6, "groups_per_step": 1}
    spec = TrainerSpec(Algo(old_policy="rollout"), Optim(lr=1e-3), total_steps=2, **options)
    trainer = Trainer(model.policy, spec)
    before_training = trainer.score(rows)
    output = trainer.step(rows)
    for logprobs, wanted in zip(output.logprobs, before_training, strict=True):
        assert np.abs(logprobs - wanted).max() < 1e-5
    pairs = zip(before_training, rows, strict=True)
    likeliest = max(logprobs[np.array(row.loss_mask) > 0].max() for logprobs, row in pairs)
    # All were sampled at -1.
    assert output.metrics["mismatch/ratio_max"] == pytest.approx(np.exp(likeliest + 1.0), rel=1e-4)
    rows[1].rollout_logprobs = None
    with pytest.raises(ValueError, match="trajectory b: rollout_logprobs must be given with"):
        trainer.step(rows)
    model.policy.load_state_dict(before)


def test_only_the_later_optimizer_steps_of_a_batch_are_scored_beforehand(model):
    rows, passes = mixed_samples(model), []
    groups = len({row.group_id for row in rows})
    spec = TrainerSpec(Algo(), Optim(lr=1e-12), total_steps=2, tokens_per_micro_batch=10**6, groups_per_step=1)
    hook = model.policy.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    Trainer(model.policy, spec).step(rows)
    hook.remove()
    assert passes == [False] * (groups - 1) + [True] * groups


def test_kl_needs_a_reference_and_pulls_towards_it(model):
    with pytest.raises(ValueError, match=r"algo.kl_coef is 0.1, so a reference policy must be given"):
        Trainer(model.policy, TrainerSpec(Algo(kl_coef=0.1), Optim(), total_steps=1, tokens_per_micro_batch=100))
    before = copy.deepcopy(model.policy.state_dict())
    reference = model.policy.frozen_copy()
    rows = mixed_samples(model)
    for row in rows:
        row.advantage = 0.0
    spec = TrainerSpec(Algo(kl_coef=1.0), Optim(lr=1e-4), total_steps=9, tokens_per_micro_batch=10**6)
    trainer = Trainer(model.policy, spec, reference=reference)
    assert trainer.step(rows).metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    kl = [trainer.step(rows).metrics["kl"] for _ in range(5)]
    assert kl[0] > 0 and kl[-1] < kl[0]
    model.policy.load_state_dict(before)


def test_unknown_names_list_the_known_ones(model):
    with pytest.raises(
        ValueError, match=r"algo.loss must be one of cispo, .*, ppo, .*, sft, or code .*, but it is 'pp0'"
    ):
        Trainer(model.policy, TrainerSpec(Algo(loss="pp0"), Optim(), total_steps=1, tokens_per_micro_batch=100))


def test_eager_attention_is_refused(model):
    """Trap 18: eager adds a boolean mask as numbers."""
    eager = copy.deepcopy(model.policy.model)
    eager.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="must not be eager"):
        Policy(eager)


def test_split_keeps_within_the_padded_budget(model):
    rows = [sample(model, str(n), [], [1] * n, [1] * n) for n in (3, 1, 2)]  # lengths 5, 3, 4
    assert [part.rows for part in split(rows, 10)] == [[0, 2], [1]]
    assert [part.rows for part in split(rows, 1)] == [[0], [2], [1]]


def test_per_token_has_a_column_for_each_response_token_and_none_for_prompts(model):
    row = sample(model, "a", [], [8, 9], [0, 1])
    longer = sample(model, "b", [], [8, 9, 7], [1, 0, 1])
    assert per_token([row, longer], lambda s: s.loss_mask).tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]


def test_learning_rate_schedules():
    optim = Optim(lr=1.0, schedule="linear", warmup_steps=2)
    assert [learning_rate_factor(optim, step, 6) for step in range(7)] == pytest.approx(
        [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25, 0]
    )
    assert learning_rate_factor(Optim(schedule="cosine"), 5, 10) == pytest.approx(0.5)
    assert learning_rate_factor(Optim(schedule="constant"), 9, 10) == 1.0


def test_bfloat16_weights_train_through_float32_masters():
    """Two gradients of 1 and 2**-9 add up in float32; in bfloat16 the second would vanish."""
    module = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    masters = MasterWeights(module)
    for scale in (1.0, 2.0**-9):
        (module.weight * scale).sum().backward()
    assert masters.parameters[0].grad.item() == 1.0 + 2.0**-9 and module.weight.grad is None
    with torch.no_grad():
        masters.parameters[0].fill_(1.0 + 2.0**-12)
    masters.publish()
    assert module.weight.item() == 1.0 and masters.parameters[0].item() == 1.0 + 2.0**-12


def test_the_optimizer_state_can_be_moved(model):
    """`meta` stands for the host here: every moment is moved, and no scalar step count."""
    rows = mixed_samples(model)
    spec = TrainerSpec(Algo(), Optim(lr=1e-6, offload=True), total_steps=2, tokens_per_micro_batch=10**6)
    trainer = Trainer(model.policy, spec)
    trainer.step(rows)
    moments = [state["exp_avg"] for state in trainer.optimizer.state.values()]
    move_state(trainer.optimizer, torch.device("meta"), HostMemory())
    moved = [state["exp_avg"] for state in trainer.optimizer.state.values()]
    assert moved and all(moment.is_meta for moment in moved) and not any(moment.is_meta for moment in moments)


def test_two_trainers_of_a_bfloat16_model_in_succession(tmp_path):
    """As a warm start and the training after it: the first removes its gradient hooks."""
    folder = tiny.build(tmp_path / "m", "qwen3_vl")
    loaded = load_model(Model(path=str(folder), device="cpu", dtype="bfloat16"), tmp_path, seed=0)
    rows = [sample(loaded, "a", [], [20, 21], [1, 1])]
    for _ in range(2):
        spec = TrainerSpec(Algo(), Optim(lr=1e-3), total_steps=1, tokens_per_micro_batch=100)
        trainer = Trainer(loaded.policy, spec)
        assert trainer.step(rows).metrics["grad_norm"] > 0
        trainer.close()


def test_text_rows_move_nothing_where_the_language_model_is_frozen(tmp_path):
    """A micro-batch without an image then has a loss that depends on no trained weight."""
    frozen = load_model(Model(path="tiny:qwen3_vl", device="cpu", freeze=("language_model",)), tmp_path, seed=0)
    text = sample(frozen, "b", [], [7, 8], [1, 1], advantage=-1.0)
    for budget in (4096, 10):  # the image in the same micro-batch, and in another
        rows = [sample(frozen, "a", [(64, 64)], [7, 8], [1, 1]), text]
        spec = TrainerSpec(Algo(), Optim(), total_steps=2, tokens_per_micro_batch=budget)
        assert Trainer(frozen.policy, spec).step(rows).metrics["grad_norm"] > 0
    before = copy.deepcopy(frozen.policy.state_dict())
    assert Trainer(frozen.policy, spec).step([text]).metrics["grad_norm"] == 0
    assert all(torch.equal(before[name], weight) for name, weight in frozen.policy.state_dict().items())
