"""The one place that runs a Hugging Face model, for the engine and for the trainer.

A :class:`Policy` wraps the model. The trainer calls it like any module: ``policy(batch, temperature) -> logprobs``. The engine
uses :meth:`Policy.hidden` and :meth:`Policy.logits` with a cache. Both get the same distribution: after temperature, and with
the media placeholder ids banned.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from vlmrl.families import family_of
from vlmrl.families.base import WHY_NOT_PACKED, ImageFeatures
from vlmrl.families.forks import Forks
from vlmrl.model import patch_embedding, tree_attention, tree_states
from vlmrl.model.cached_attention import CachedAttention, cache_name
from vlmrl.model.compiled_layers import compile_layers
from vlmrl.model.divergence import Against, Listed, divergence_from
from vlmrl.model.expert_routing import ExpertRouters
from vlmrl.model.fused_norms import use_fused_norms
from vlmrl.model.head import logits_of, score_tokens
from vlmrl.model.image_attention import install_image_attention
from vlmrl.model.lora import adapters_off
from vlmrl.multimodal.mm_inputs import merge_mm_inputs
from vlmrl.types import MediaItem, MicroBatch, to_device


class TokenScores(NamedTuple):
    """Per token ``[rows, length]``, float32, zero except at targets: the logprob and the distribution's entropy, in nats."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    states: torch.Tensor | None = None
    """``[targets, width]``, in row order, without gradient: the hidden state that each target is predicted from."""
    divergence: torch.Tensor | None = None
    """From a teacher, for each of its tokens ``[n]``; by sample, ``[rows, length]`` as above. None without a teacher."""
    agreement: torch.Tensor | None = None
    """1 where the teacher's first choice is the same, in the same shape."""


class Policy(nn.Module):
    """A causal language model, with or without a vision tower. ``banned_ids`` have probability 0 in sampling and in training.

    ``image_processor`` is from :meth:`Family.load_processor`; a policy that gets no images needs none.
    """

    def __init__(self, model: Any, image_processor: Any = None) -> None:
        super().__init__()
        self.model = model
        self.image_processor = image_processor
        self.config = model.config
        self.family = family_of(model.config)
        self.image_token_id = self.family.image_token_id
        self.banned_ids = self.family.banned_ids
        self._cache_name = cache_name(model.model)
        self.routing = ExpertRouters(model, self.family.router) if self.family.router else None
        _check_attention(model.config)
        _check_dropout(model)
        tree_attention.install(model)
        if self.family.joins_images:
            install_image_attention(model)
        if self.family.forked_layers is not None:
            tree_states.install_forks(model, self.family.forked_layers, self.family.run_forked)
        patch_embedding.use_linear_patches(model)
        use_fused_norms(model)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def frozen_copy(self) -> Policy:
        """A copy with frozen weights: the reference of a KL penalty."""
        copied = copy.deepcopy(self.model)
        return Policy(copied, self.image_processor).requires_grad_(False).eval()

    @torch.no_grad()
    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Overwrite the weights in ``named``, by their Hugging Face names; others stay as they are."""
        own = dict(self.model.named_parameters())
        for name, weight in named:
            own[name].copy_(weight)

    def enable_gradient_checkpointing(self) -> None:
        """Recompute the layers' activations in the backward pass instead of keeping them. Takes effect in training mode."""
        old_name = self.model.gradient_checkpointing_enable  # deprecated where `activation_checkpointing_enable` exists
        settings: dict[str, Any] = {"use_reentrant": False}
        if self.routing is not None:
            settings["context_fn"] = self.routing.checkpointed
        getattr(self.model, "activation_checkpointing_enable", old_name)(settings)

    def compile_layers(self) -> None:
        """Compile the decoder layers at their first calls without a KV cache. FSDP must shard them afterwards."""
        compile_layers(self.model, self.family)

    def forward(
        self,
        batch: MicroBatch,
        temperature: float = 1.0,
        against: Against | Listed | None = None,
    ) -> TokenScores:
        """The logprob of each token that ``batch.targets`` marks, given all tokens before it in its row.

        With ``against``, also the divergence from a teacher: here, since FSDP gathers the head only within a forward pass.
        """
        if batch.ends is not None and not self.family.may_share:
            raise ValueError(f"samples of {self.config.model_type} must not be packed into one row: {WHY_NOT_PACKED}.")
        features = self.encode_images(batch.images) if batch.images else []
        occurrences = [features[index] for index in batch.image_order]
        tree = None if batch.ends is None else tree_attention.plan(to_device(batch.ends[0], self.device))
        forks = None
        if batch.ends is not None and self.family.recurrent:
            forks = tree_states.forks(batch.ends[0], convolved_before(self.config), self.device)
        zero = self._blank_image() if batch.blank_image and not occurrences else None
        with self._replayed(batch.experts):
            hidden = self.hidden(batch.token_ids, batch.position_ids, occurrences, zero=zero, tree=tree, forks=forks)
        # The indices are made on the host: a GPU's `nonzero` waits until everything before it is computed.
        rows, places = (to_device(indices, self.device) for indices in batch.targets.nonzero(as_tuple=True))
        before = places - 1 if batch.parents is None else batch.parents[rows, places]
        chosen = hidden[rows, before]  # a token is predicted by the one before it; no other code shifts tokens
        labels = batch.token_ids[rows, places]
        head = self.model.lm_head
        logprobs, entropy = score_tokens(chosen, head.weight, head.bias, labels, temperature, self.banned_ids)
        zeros = hidden.new_zeros(batch.token_ids.shape, dtype=torch.float32)
        logprobs, entropy = (zeros.index_put((rows, places), each) for each in (logprobs, entropy))
        scores = TokenScores(logprobs, entropy, chosen.detach())
        if against is None:
            return scores
        numbers = batch.targets.flatten().cumsum(0) - 1
        own = chosen[to_device(numbers[against.tokens], self.device)]
        divergence, agreement = divergence_from(against, own, head.weight, head.bias, temperature, self.banned_ids)
        return scores._replace(divergence=divergence, agreement=agreement)

    def _replayed(self, experts: torch.Tensor | None) -> AbstractContextManager[None]:
        """Within the context, ``experts`` ``[rows, length, layers, top_k]`` are the tokens' experts."""
        if self.routing is None or experts is None:
            return nullcontext()
        return self.routing.replayed(experts.flatten(0, 1))

    def hidden(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        images: Sequence[ImageFeatures] = (),
        cache: Any = None,
        zero: torch.Tensor | None = None,
        real: torch.Tensor | None = None,
        tree: tree_attention.Plan | None = None,
        cached: CachedAttention | None = None,
        forks: Forks | None = None,
    ) -> torch.Tensor:
        """Last hidden states ``[rows, length, hidden]``.

        ``position_ids``: ``[3, rows, length]``. Rows are plain causal ones, unless ``tree`` describes the layout of a single row, and
        ``forks`` that of its recurrent layers, or ``cached`` what the tokens attend to in ``cache``, a Hugging Face cache.
        ``images``: by occurrence, in row order. ``zero``: added to the embeddings, so that the weights it was computed from take part
        in the gradient. ``real``: ``[rows, length]``, False for padding on the left; recurrent layers skip it.
        """
        inputs: dict[str, Any] = {"position_ids": position_ids if self.family.mrope else position_ids[0]}
        if tree is not None:
            inputs["tree"] = tree  # reaches the attention function
        if cached is not None:
            inputs["cached"] = cached  # likewise
        if forks is not None:
            inputs["forks"] = forks  # reaches the recurrent layers
        if zero is None:
            inputs["input_ids"] = token_ids
        else:
            inputs["inputs_embeds"] = self.model.get_input_embeddings()(token_ids) + zero
        padding = (
            {"full_attention": None, "linear_attention": real} if self.family.recurrent and cache is not None else None
        )
        # Each distinct image was encoded once; its features are inserted at every occurrence.
        with self.family.insert_features(self.model, images) if images else nullcontext({}) as more:
            output = self.model.model(
                attention_mask=padding,
                use_cache=cache is not None,
                **{self._cache_name: cache},
                **inputs,
                **more,
            )
        return output.last_hidden_state

    def encode_images(self, images: Sequence[MediaItem]) -> list[ImageFeatures]:
        """The features of each image, by the model's own vision tower."""
        if self.image_processor is None:
            raise ValueError(
                "a policy that reads images needs the model's image processor: Policy(model, image_processor)."
            )
        mm_inputs = merge_mm_inputs(images, self.family, self.image_processor, self.device)
        return self.family.encode_images(self.model, mm_inputs)

    def _blank_image(self) -> torch.Tensor:
        """A zero whose gradient, of zeros, reaches all of the vision tower, so that this rank takes part in FSDP's collectives."""
        image = self.family.encode_images(self.model, self.family.blank_inputs(self.device))[0]
        return 0 * torch.stack([features.sum() for features in (image.embeds, *image.deepstack)]).sum()

    def logits(self, hidden: torch.Tensor, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
        """Float32 logits ``[n, vocabulary]`` of hidden states ``[n, hidden]``, after temperature and banned ids."""
        head = self.model.lm_head
        return logits_of(hidden, head.weight, head.bias, temperature, self.banned_ids)


def layer_kinds(config: Any) -> list[str]:
    """Each layer's kind, under Hugging Face's names: ``full_attention`` or ``linear_attention``."""
    text = config.get_text_config()
    return getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers


def head_width(config: Any) -> int:
    """Channels of one attention head of the decoder."""
    text = config.get_text_config()
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def convolved_before(config: Any) -> int:
    """How many earlier tokens the convolution of a recurrent layer reads."""
    return int(getattr(config.get_text_config(), "linear_conv_kernel_dim", 1)) - 1


def cached_elements(config: Any) -> int:
    """Numbers in the KV cache for one token. Recurrent layers have no KV cache."""
    layers = layer_kinds(config).count("full_attention")
    return 2 * layers * config.get_text_config().num_key_value_heads * head_width(config)


def _check_attention(config: Any) -> None:
    """Raise ValueError for configs that would give wrong numbers silently."""
    text = config.get_text_config()
    if getattr(text, "_attn_implementation", None) == "eager":
        raise ValueError("attn_implementation must not be eager: it adds a boolean mask as numbers. Load with sdpa.")
    unknown = set(layer_kinds(config)) - {"full_attention", "linear_attention"}
    if unknown:
        raise ValueError(
            f"all layers must attend to the whole row, but the config's layer_types hold {sorted(unknown)}."
        )


def _check_dropout(model: nn.Module) -> None:
    """Raise ValueError for dropout: old and new logprobs of an unchanged policy would come from different masks."""
    for name, module in model.named_modules():
        dropout = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", None)
        if isinstance(dropout, float | int) and dropout:
            raise ValueError(f"dropout must be 0 in the model's config, but it is {dropout} in {name}.")


def without_adapters(policy: Policy) -> Callable[[MicroBatch, float], TokenScores]:
    """``policy`` without its adapters: a KL reference without a second copy of the model."""

    def score(batch: MicroBatch, temperature: float) -> TokenScores:
        with adapters_off(policy.model):
            return policy(batch, temperature)

    return score
