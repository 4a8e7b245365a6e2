"""What the responses of a rollout step cost with the bare Hugging Face model: the bound that `vs_trl.py` prints beside its result.

No engine, no trainer: a loop over a KV cache that feeds the same responses again, and one forward and backward over the unique tokens.
Prompts are computed once per group and distinct images are encoded once. Image processing, tools, the audit and the optimizer are left
out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText, DynamicCache

from vlmrl.families.base import Family
from vlmrl.model.cached_attention import cache_name
from vlmrl.types import Trajectory


class BareLoop:
    """The responses of ``trajectories``: groups of ``members`` in order, in which all rows and their turns have equal lengths."""

    def __init__(self, folder: Path, trajectories: Sequence[Trajectory], members: int, family: Family) -> None:
        self.model: Any = AutoModelForImageTextToText.from_pretrained(
            folder, dtype="float32", attn_implementation="sdpa"
        )
        self.model.eval()
        self.members = members
        self.turns = [(len(turn.prompt_ids), len(turn.response_ids)) for turn in trajectories[0].turns]
        rows = [
            [token for turn in each.turns for token in turn.prompt_ids + turn.response_ids] for each in trajectories
        ]
        media = [[item for turn in each.turns for item in turn.media] for each in trajectories]
        is_linear = all(each.continues(number) for each in trajectories for number in range(1, len(each.turns)))
        if len({len(row) for row in rows}) > 1 or not is_linear:
            raise SystemExit("the bare loop needs trajectories of equal length: raise --teach-rounds.")
        self.ids = torch.tensor(rows)
        self.positions = torch.stack([family.positions(row, own)[0] for row, own in zip(rows, media, strict=True)], 1)
        self.image_token_id = family.image_token_id
        self._prepare_images(folder, media)

    def _prepare_images(self, folder: Path, media: Sequence[Sequence[Any]]) -> None:
        """``shown[row][i]`` is the index of the row's i-th image among the distinct ones."""
        distinct = {item.id: item for item in chain.from_iterable(media)}
        index_of = {name: index for index, name in enumerate(distinct)}
        self.shown = [[index_of[item.id] for item in row] for row in media]
        images = [item.image for item in distinct.values()]
        inputs = AutoImageProcessor.from_pretrained(folder)(images=images, do_resize=False, return_tensors="pt")
        self.patches, self.grids = inputs["pixel_values"], inputs["image_grid_thw"]
        self.num_patches = self.grids.prod(1).tolist()

    def seconds(self) -> tuple[float, float]:
        """Of sampling the responses, and of the forward and backward pass."""
        began = time.perf_counter()
        with torch.no_grad():
            self._generate()
        sampled = time.perf_counter()
        self._train()
        return sampled - began, time.perf_counter() - sampled

    def _generate(self) -> None:
        """Each turn: its images, what is new in its prompt, then token by token. The tokens that are drawn are thrown away."""
        cache, start = DynamicCache(config=self.model.config), 0
        for turn, (prompt, response) in enumerate(self.turns):
            stop = sum(map(sum, self.turns[:turn])) + prompt
            rows = slice(None, None, self.members if turn == 0 else None)
            features = self._encode([shown[turn] for shown in self.shown])
            hidden = self._forward(rows, start, stop, cache, features, slice(turn, turn + 1))
            if turn == 0:
                hidden = self._branch(hidden, cache)
            for place in range(stop, stop + response):
                probabilities = self.model.lm_head(hidden[:, -1]).softmax(-1)
                torch.multinomial(probabilities, 1)
                if place + 1 < stop + response:
                    hidden = self._forward(slice(None), place, place + 1, cache)
            start = stop + response - 1  # a response's last token is run with the next turn's prompt

    def _train(self) -> float:
        """Prompts first, one row a group; then the rest of all rows on the prompts' keys and values. Returns the mean loss."""
        cache, length = DynamicCache(config=self.model.config), self.ids.shape[1]
        prompt = self.turns[0][0]
        features = self._encode(list(chain.from_iterable(self.shown)))
        prompts = self._forward(slice(None, None, self.members), 0, prompt, cache, features, slice(0, 1))
        prompts = self._branch(prompts, cache)
        rest = self._forward(slice(None), prompt, length, cache, features, slice(1, None))
        hidden = torch.cat([prompts[:, -1:], rest], 1)
        edges, trained = 0, []
        for new, response in self.turns:
            trained += range(edges + new, edges + new + response)
            edges += new + response
        chosen = torch.tensor(trained)
        logits = self.model.lm_head(hidden[:, chosen - prompt])
        loss = -logits.log_softmax(-1).gather(2, self.ids[:, chosen, None]).mean()
        loss.backward()
        self.model.zero_grad(set_to_none=True)
        return float(loss.detach())

    def _encode(self, wanted: Sequence[int]) -> dict[int, tuple[torch.Tensor, ...]]:
        """The features of the distinct images in ``wanted``: those of the embeddings, then of each deepstack level."""
        indices = sorted(set(wanted))
        patches = self.patches.split(self.num_patches)
        output = self.model.model.get_image_features(
            torch.cat([patches[index] for index in indices]), self.grids[indices], return_dict=True
        )
        return dict(zip(indices, zip(output.pooler_output, *output.deepstack_features, strict=True), strict=True))

    def _forward(
        self,
        rows: slice,
        start: int,
        stop: int,
        cache: DynamicCache,
        features: dict[int, tuple[torch.Tensor, ...]] | None = None,
        shown: slice = slice(0),
    ) -> torch.Tensor:
        """Hidden states of tokens ``start`` to ``stop``, which hold the images ``shown`` of each row."""
        ids = self.ids[rows, start:stop]
        embeds, more = self.model.get_input_embeddings()(ids), {}
        if features is not None:
            found = [features[index] for row in self.shown[rows] for index in row[shown]]
            levels = [torch.cat(level) for level in zip(*found, strict=True)]
            places = ids == self.image_token_id
            embeds = embeds.masked_scatter(places[..., None], levels[0])
            more = {"visual_pos_masks": places, "deepstack_visual_embeds": levels[1:]}
        output = self.model.model.language_model(
            inputs_embeds=embeds,
            position_ids=self.positions[:, rows, start:stop],
            use_cache=True,
            **{cache_name(self.model.model.language_model): cache},
            **more,
        )
        return output.last_hidden_state

    def _branch(self, hidden: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Repeat each group's row for its members."""
        cache.batch_repeat_interleave(self.members)
        return hidden.repeat_interleave(self.members, 0)
