"""The memory of a micro-batch: activations, logits and image features, from the model's shape.

Each factor counts the bytes per token that autograd keeps for the operations of transformers' layers in bfloat16. A tensor of the
layer's width H in bfloat16 is 2H, in float32 4H. The test compares the sums with the allocator of a simulated GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vlmrl.families import family_of
from vlmrl.families.base import LargestImage, VisionShape
from vlmrl.model.fused_norms import fusible_norms
from vlmrl.model.head import LOGITS_ON_GPU
from vlmrl.model.policy import head_width, layer_kinds


@dataclass(frozen=True)
class ModelShape:
    """The widths of a decoder and of its vision tower. Widths of a mixture of experts are those of the experts that a token uses."""

    layers: int
    hidden: int
    heads: int
    queries: int
    """Width of all query heads."""
    keys: int
    """Width of all key heads; values have the same."""
    intermediate: int
    vocabulary: int
    qk_norm: bool
    fused_norms: bool = True
    """Whether a norm is one kernel: :mod:`vlmrl.model.fused_norms`."""
    experts_per_token: int = 0
    largest_layer: int = 0
    """Parameters of the largest layer that FSDP gathers as a whole."""
    outside_layers: int = 0
    """Parameters outside of these layers, such as embeddings and head: FSDP's root."""
    vision: VisionShape | None = None
    image: LargestImage | None = None
    """What the largest image of the run costs. ``None``: no images are planned."""

    @classmethod
    def of(cls, model: Any, image: LargestImage | None = None) -> ModelShape:
        """The shape of a Hugging Face model, which may be on the meta device."""
        config = model.config
        text = config.get_text_config()
        head = head_width(config)
        experts = getattr(text, "num_experts_per_tok", 0) if getattr(text, "num_experts", 0) else 0
        names = [name for name, _ in model.named_modules()]
        layers = [m for m in model.modules() if type(m).__name__ in set(model._no_split_modules or ())]
        sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
        total = sum(p.numel() for p in model.parameters())
        return cls(
            layers=len(layer_kinds(config)),
            hidden=text.hidden_size,
            heads=text.num_attention_heads,
            queries=text.num_attention_heads * head,
            keys=text.num_key_value_heads * head,
            intermediate=text.moe_intermediate_size if experts else text.intermediate_size,
            vocabulary=text.vocab_size,
            qk_norm=any(name.endswith("q_norm") for name in names),
            fused_norms=bool(fusible_norms(model)),
            experts_per_token=experts,
            largest_layer=max(sizes, default=0),
            outside_layers=total - sum(sizes),
            vision=family_of(config).vision_shape,
            image=image,
        )

    @property
    def mlp_bytes(self) -> int:
        """Dense: gate, its activation, up and their product. Experts: these and the copies of the input and the output for each."""
        if self.experts_per_token:
            return self.experts_per_token * (8 * self.intermediate + 6 * self.hidden)
        return 8 * self.intermediate

    def norm_bytes(self, adapted: bool = False) -> int:
        """For each number of its input: input and output, 4. As eight kernels: its float32 input and its output, 6, and its normalized
        input, 2, for the gradient of its weight."""
        if self.fused_norms:
            return 4
        return 6 if adapted else 8

    def layer_bytes(self, adapted: bool) -> int:
        """Of one layer, per token.

        A norm: :meth:`norm_bytes`. Most families norm queries and keys, too. Attention: queries, keys, values, output, and a float32
        log-sum-exp. ``adapted``: only adapters are trained, so the norms' weights have no gradient.
        """
        norm = self.norm_bytes(adapted)
        qk_norm = norm - 2 if self.qk_norm else 0
        attention = (4 + qk_norm) * (self.queries + self.keys) + 4 * self.heads
        return 2 * norm * self.hidden + attention + self.mlp_bytes


@dataclass(frozen=True)
class MicroBatchSize:
    """The tokens, targets and image patches of one forward pass."""

    tokens: int
    targets: int
    patches: int = 0


@dataclass(frozen=True)
class Gradients:
    """What is trained, as far as it changes what is kept for the backward pass."""

    checkpointed: bool
    head: bool = True
    vision: bool = True
    adapted: bool = False
    """Adapters on the decoder's linear layers."""


def micro_batch_memory(shape: ModelShape, size: MicroBatchSize, gradients: Gradients) -> dict[str, float]:
    """Bytes at the peak of forward and backward: kept activations, recomputed layer, logits, vision tower.

    The peak is at the head, or in a layer's backward pass.
    """
    hidden, tokens = shape.hidden, size.tokens
    layer = float(shape.layer_bytes(gradients.adapted))
    kept = 2 * hidden if gradients.checkpointed else layer
    # The final norm, its output, the states of targets.
    outside = ((shape.norm_bytes() + 2) * tokens + 2 * size.targets) * hidden
    activations = tokens * shape.layers * kept + outside
    chunk = min(size.targets, max(1, LOGITS_ON_GPU // shape.vocabulary)) * shape.vocabulary
    head = max(12 * chunk, 10 * chunk + (4 * hidden * shape.vocabulary if gradients.head else 0))
    temporary = 2 * hidden + shape.mlp_bytes / 4  # the gradients of a layer's output and of the MLP's product
    in_layer = tokens * (temporary + (layer if gradients.checkpointed else 0))
    vision, vision_layer = _vision(shape, size.patches, gradients)
    more = (
        {"logits": head, "recomputed layer": 0.0} if head >= in_layer else {"logits": 0.0, "recomputed layer": in_layer}
    )
    at_end = vision_layer + 10 * tokens * hidden  # the vision tower's backward pass, when the decoder's is done
    if at_end > activations + head + in_layer:
        return {"activations": 10.0 * tokens * hidden, "vision tower": vision + vision_layer, "logits": 0.0}
    return {"activations": activations, **more, "vision tower": vision}


def _vision(shape: ModelShape, patches: int, gradients: Gradients) -> tuple[float, float]:
    """Bytes that the vision tower keeps, and those of one block's backward pass.

    A block: two norms' inputs and outputs 8H, queries, keys and their joint projection 10H, attention 4H, and its MLP 4I.
    A projector: on a quarter of the patches four times as wide, its norm, two linear layers and GELU, 8H, and its output.
    """
    vision = shape.vision
    if vision is None or not patches:
        return 0.0, 0.0
    block = 22 * vision.hidden + 4 * vision.intermediate
    output = 2 * shape.hidden / vision.patches_per_token
    inputs = 6 * vision.pixels  # pixels in float32 and in bfloat16
    if not gradients.vision:
        return patches * (4 * vision.pixels + vision.outputs * output), patches * block
    kept = vision.depth * (2 * vision.hidden if gradients.checkpointed else block)
    projectors = vision.outputs * (8 * vision.hidden + output)
    return patches * (inputs + kept + projectors), patches * (block + 2 * vision.hidden + 2 * vision.intermediate)
