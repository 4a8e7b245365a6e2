"""Load a model with its tokenizer and processor: from a hub name, from a folder, or a tiny one built locally."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from vlmrl.config import Lora, Model, Train
from vlmrl.config.code import is_local_path, resolve_path
from vlmrl.config.saved import is_checkpoint
from vlmrl.families import family_of
from vlmrl.families.base import Family, LargestImage
from vlmrl.model import tiny
from vlmrl.model.lora import add_lora, named_weights
from vlmrl.model.model_files import (
    check_config,
    check_config_file,
    check_processors,
    check_tokenizer_files,
    check_weight_files,
    forget_code,
    load_video_processor,
)
from vlmrl.model.policy import Policy
from vlmrl.model.progress_bars import one_at_a_time, without_progress_bars
from vlmrl.multimodal.images import blank
from vlmrl.multimodal.pixel_memory import PixelMemory
from vlmrl.multimodal.renderer import OUR_TEMPLATES, Renderer
from vlmrl.multimodal.store import MediaStore
from vlmrl.utils.json_files import read_object

TEMPLATES = Path(__file__).parents[1] / "multimodal/templates"


@dataclass(frozen=True)
class Reader:
    """Everything of a model but its weights: tokenizer, chat template and processors (``None`` for a text model).

    ``path`` is the folder or hub name that it was loaded from.
    """

    renderer: Renderer
    tokenizer: Any
    image_processor: Any
    video_processor: Any
    max_image_pixels: int | None
    path: str
    family: Family

    def new_store(self, memory: PixelMemory | None = None, blank_images: bool = False) -> MediaStore | None:
        """A store whose pixels are in ``memory``, by default one of its own; ``None`` for a text model."""
        if self.image_processor is None:
            return None
        transform = blank if blank_images else None
        options: dict[str, Any] = {"max_pixels": self.max_image_pixels, "transform": transform, "memory": memory}
        return MediaStore(self.family, self.image_processor, **options)


@dataclass(frozen=True)
class LoadedModel(Reader):
    """A model with its weights."""

    policy: Policy

    @property
    def is_on_meta(self) -> bool:
        """Whether this process has only the shapes of the weights, on the device ``meta``."""
        return self.policy.device.type == "meta"

    @without_progress_bars()
    def save(self, folder: Path, weights: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
        """Save ``weights`` (by default this model's, adapters merged), tokenizer and processor in Hugging Face form."""
        model = self.policy.model
        published = dict(as_saved(model, named_weights(model) if weights is None else weights))
        model.save_pretrained(folder, state_dict=published, save_original_format=False)  # `as_saved` has converted them
        self.tokenizer.chat_template = self.renderer.chat_template  # the template that it was trained with
        self.tokenizer.save_pretrained(folder)
        if self.image_processor is not None:
            self.image_processor.save_pretrained(folder)
            self.video_processor.save_pretrained(folder)  # AutoProcessor has both


def as_saved(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights under their names and in their layout in checkpoints, which servers expect. Both may differ from the module's.

    For example, ``model.visual.patch_embed.proj.weight`` is ``visual.patch_embed.proj.weight`` in Qwen2.5-VL's checkpoints.
    """
    family = family_of(model.config)
    for name, weight in weights:
        for saved, value in revert_weight_conversion(model, {name: weight}).items():
            yield saved, family.published(saved, value)


@without_progress_bars()
def load_model(config: Model, cache_dir: Path, seed: int) -> LoadedModel:
    """Load the model of ``config``. Tiny models are built in ``cache_dir``; ``seed`` draws random weights.

    On the device ``meta`` no weight is read and none allocated: only their shapes exist.
    """
    model = _build(config, _found(config.source, cache_dir), seed)
    reader = load_reader(config, cache_dir)
    return LoadedModel(**vars(reader), policy=Policy(model, reader.image_processor).eval())


def shapes_of(config: Model, cache_dir: Path) -> Any:
    """The Hugging Face model of ``config`` on the device ``meta``, with its adapters and frozen parts."""
    return _build(replace(config, device="meta"), _found(config.source, cache_dir), seed=0)


@without_progress_bars()
def read_weights(config: Model, cache_dir: Path, seed: int) -> Any:
    """The Hugging Face model of ``config`` on the CPU, in its checkpoint's dtype, without adapters and with all parts trainable.

    In that dtype weights stay in the checkpoint's mapped files until they are used, unless transformers has to convert their layout.
    """
    path = _found(config.source, cache_dir)
    return _build(replace(on_host(config, cache_dir), lora=Lora(), freeze=()), path, seed)


def on_host(config: Model, cache_dir: Path) -> Model:
    """``config`` with the CPU as the device, and with the dtype of the weights in its files."""
    in_bfloat16 = not config.random_weights and _is_stored_in_bfloat16(_found(config.source, cache_dir))
    return replace(config, device="cpu", dtype="bfloat16" if in_bfloat16 else "float32")


def draw_adapters(config: Model, cache_dir: Path, seed: int) -> dict[str, torch.Tensor]:
    """The initial adapters of ``config`` by name, on the CPU in float32: the numbers that a model with weights would get."""
    model = shapes_of(replace(config, lora=Lora()), cache_dir)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            # An adapter takes its layer's device and dtype: one number stands for all of the layer's weight.
            stand_in = torch.zeros(()).expand(layer.weight.shape)
            layer.weight = nn.Parameter(stand_in, requires_grad=layer.weight.requires_grad)
    _adapt(model, config.lora, seed)
    return {name: weight.detach() for name, weight in model.named_parameters() if ".lora_" in name}


@one_at_a_time()
def _build(config: Model, path: str, seed: int) -> Any:
    hf_config = _hf_config(path)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    auto: Any = AutoModelForImageTextToText if family_of(hf_config).vision else AutoModelForCausalLM
    check_config(path, hf_config)
    if device.type == "meta":
        with torch.device(device):
            model = auto.from_config(hf_config, dtype=dtype, attn_implementation="sdpa")
    elif config.random_weights:
        torch.manual_seed(seed)
        model = _random(auto, hf_config, dtype).to(device)
    else:
        check_weight_files(path)
        # Read again, without `config`, the file's own `_attn_implementation` would come before ours: also code of the hub.
        options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa", "output_loading_info": True}
        model, found = auto.from_pretrained(path, config=hf_config, **options)
        _check_weights(model, found, path)
        model = model.to(device)
    freeze(model, config.freeze)
    if config.lora.rank:
        _adapt(model, config.lora, seed)
    return model


def _check_weights(model: Any, found: dict[str, Any], path: str) -> None:
    """Raises ValueError unless the files of ``path`` have the model's weights and no others, and its config says what is tied."""
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"model.path {path!r} lacks weights of its model, which would be random: {', '.join(missing[:5])}. If the output layer is "
            "missing, its config.json may need tie_word_embeddings: true."
        )
    if unexpected := sorted(found["unexpected_keys"]):
        raise ValueError(
            f"model.path {path!r} has weights that its model does not have, which would be lost: {', '.join(unexpected[:5])}. Remove "
            "them, or correct its config.json."
        )
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    tied = model.config.get_text_config().tie_word_embeddings
    if tied and head is not None and head.weight is not embeddings.weight:
        raise ValueError(
            f"model.path {path!r} has an output layer that differs from its embeddings, but its config.json says "
            "tie_word_embeddings: true, by which servers would leave it out. Set it to false, or remove the output layer."
        )


def _random(auto: Any, hf_config: Any, dtype: torch.dtype) -> Any:
    """A model with random weights, drawn on the CPU in float32: the same on every device and, rounded, in every dtype."""
    model = auto.from_config(hf_config, dtype=torch.float32, attn_implementation="sdpa")
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    model.config.dtype = dtype
    for name in model.config.sub_configs:  # a saved model's readers, such as servers, take the dtype of the text's
        getattr(model.config, name).dtype = dtype
    return model


def _adapt(model: Any, lora: Lora, seed: int) -> None:
    with torch.random.fork_rng(devices=[]):  # peft draws on the CPU; with several GPUs torch warns otherwise
        torch.manual_seed(seed)  # all ranks must draw the same weights
        add_lora(model, lora)


def _is_stored_in_bfloat16(path: str) -> bool:
    """Whether all weights of a checkpoint, in a folder or under a hub name, are bfloat16 in safetensors files."""
    check_weight_files(path)
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    if index is not None:
        files, _ = get_checkpoint_shard_files(path, index)
    else:
        single = cached_file(path, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
        files = [] if single is None else [single]
    dtypes = set()
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            dtypes |= {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118 - it is no dict
    return dtypes == {"BF16"}


def freeze(model: Any, names: tuple[str, ...]) -> None:
    """Freeze parameters: ``names`` are parts of the model's family or patterns such as ``model.visual.blocks.0.*``.

    Raises:
        ValueError: a name fits no parameter, or nothing is left to train.
    """
    parts = family_of(model.config).parts
    for name in names:
        found = [p for key, p in model.named_parameters() if _is_part(key, name, parts)]
        if not found:
            raise ValueError(
                f"model.freeze must name {', '.join(parts)} or a pattern of parameter names such as 'model.visual.*', but "
                f"{name!r} fits none of this model's."
            )
        for parameter in found:
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"model.freeze {list(names)} leaves nothing to train: name fewer parts.")


def _is_part(key: str, name: str, parts: dict[str, str]) -> bool:
    return re.search(parts[name], key) is not None if name in parts else fnmatch(key, name)


def load_reader(config: Model, cache_dir: Path) -> Reader:
    """The model of ``config`` without its weights."""
    path = _found(config.source, cache_dir)
    family = _family(path)
    check_tokenizer_files(path, family.config)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    pad = family.image_token_id
    renderer = Renderer(
        tokenizer,
        image_token=None if pad is None else str(tokenizer.convert_ids_to_tokens(pad)),
        chat_template=chat_template_text(config.chat_template),
        stop_ids=_stop_ids(path),
    )
    processor = family.load_processor(path)
    video_processor = load_video_processor(path) if family.vision else None
    return Reader(renderer, tokenizer, processor, video_processor, config.max_image_pixels, path, family)


def image_processor_of(config: Model, cache_dir: Path) -> Any:
    """The image processor of the model of ``config``; ``None`` for a text model."""
    path = _found(config.source, cache_dir)
    return _family(path).load_processor(path)


def largest_image_of(config: Model, cache_dir: Path) -> LargestImage | None:
    """What the largest image of the model of ``config`` costs; ``None`` for a text model."""
    path = _found(config.source, cache_dir)
    return _family(path).largest_image(path, config.max_image_pixels)


def _found(path: str, cache_dir: Path) -> str:
    """The absolute path of a local model folder, or a hub name as it is. A tiny model is built at its first use.

    Raises:
        ValueError: ``path`` is a local path that does not exist, a file, or a folder without a model, such as a checkpoint.
        OSError: the hub has no such model, or cannot be reached.
    """
    path = tiny.resolve(path, cache_dir)
    folder = Path(path).expanduser().absolute()
    if folder.is_dir():
        _check_model_folder(folder)
        return str(folder)
    if folder.is_file():
        raise ValueError(f"model.path must be the folder of a model in Hugging Face form, but {folder} is a file.")
    if is_local_path(path):
        raise ValueError(f"model.path {path!r} does not exist. Looked at: {folder}")
    _ask_hub_once(path)
    return path


def _ask_hub_once(name: str) -> None:
    """Raises OSError after one request if the hub does not give the model's config. transformers would repeat it for 23 s."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=10)
    except hub_errors() as error:
        reason = str(error).strip().splitlines()[0]
        raise OSError(
            f"model.path {name!r}: no such folder, and the hub does not give its config.json: {reason}"
        ) from error


def hub_errors() -> tuple[type[BaseException], ...]:
    """What huggingface_hub raises if the hub refuses or cannot be reached: OSError and the HTTPError of its HTTP library.

    That library is httpx in huggingface_hub 1, and httpx2 in huggingface_hub 2.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__bases__


def is_model_folder(folder: Path) -> bool:
    """Whether ``folder`` holds a model in Hugging Face form."""
    return "model_type" in (read_object(folder / "config.json") or {})


def _check_model_folder(folder: Path) -> None:
    """Raises ValueError unless ``folder`` holds a model in Hugging Face form; the message says what it is instead."""
    if is_model_folder(folder):
        return
    if is_checkpoint(folder):
        what = f"a checkpoint of a run. Make a model of it first: vlmrl export {folder} --to FOLDER"
    elif (folder / "model/config.json").is_file():
        what = f"the folder of a run. Its model is {folder / 'model'}"
    else:
        what = "a folder without the config.json of a model"
    raise ValueError(f"model.path must be a model in Hugging Face form, but {folder} is {what}.")


def _hf_config(path: str) -> Any:
    """The model's config. Raises OSError, in one line, if the hub does not have it or cannot be reached."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)  # else it asks on the terminal
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"model.path must be a model that transformers knows, but {path!r} brings code of its own, which is not run: install a "
            "version of transformers that has the model, or take another one."
        ) from error
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise OSError(
            f"model.path {path!r} is not a local folder, and loading it from the hub failed: {reason}"
        ) from error
    check_config_file(path)
    forget_code(config)
    return config


def _family(path: str) -> Family:
    """The family of the model, whose image processor is about to be loaded."""
    family = family_of(_hf_config(path))
    if family.vision:
        check_processors(path)
    if family.processor_reads_tokenizer:
        check_tokenizer_files(path, family.config)
    return family


def pick_device(name: str) -> torch.device:
    """The device that ``model.device`` names. Raises ValueError for one that is none, or a GPU that this machine does not have."""
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"model.device must be auto, cpu, cuda or cuda:NUMBER, but it is {name!r}.") from error
    gpus = torch.cuda.device_count() if device.type == "cuda" else math.inf
    if (device.index or 0) >= gpus:
        raise ValueError(
            f"model.device must be a device of this machine, but it is {name!r}, and torch {torch.__version__} finds {gpus} GPUs: "
            "set --model.device auto, or look into the driver, CUDA_VISIBLE_DEVICES and the build of torch (vlmrl doctor)."
        )
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def pick_checkpointing(setting: bool | None, device: torch.device) -> bool:
    """Whether to recompute activations: ``setting``, or by default on a GPU, where memory is what limits a run."""
    return device.type == "cuda" if setting is None else setting


def prepare_layers(policy: Policy, train: Train, device: torch.device) -> None:
    """Checkpoint and compile the layers of a policy that trains on ``device``, as ``train`` says."""
    if pick_checkpointing(train.gradient_checkpointing, device):
        policy.enable_gradient_checkpointing()
    if train.compile_layers:
        policy.compile_layers()


def chat_template_text(name: str | None) -> str | None:
    """The text of one of vlmrl's templates, by name, or of a file ``NAME.jinja``.

    It becomes a part of the saved and exported model: the settings of somebody else's run must not name just any file of this machine.
    """
    if name is None:
        return None
    ours = TEMPLATES / f"{name}.jinja"
    try:
        path = Path(os.path.realpath(ours if ours.is_file() else resolve_path(name)))
        if not path.is_file():
            raise ValueError(f"{path} is no regular file")
        if path.suffix != ".jinja":
            raise ValueError(f"{path} is not named NAME.jinja: copy it to such a file")
        return path.read_text()
    except (ValueError, OSError) as error:
        raise ValueError(
            f"model.chat_template must be a file NAME.jinja or one of ours ({OUR_TEMPLATES}), but it is {name!r}: {error}"
        ) from error


def _stop_ids(path: str) -> list[int]:
    """The end-of-sequence ids of the model's generation config."""
    try:
        ids = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        return []
    return [ids] if isinstance(ids, int) else list(ids or [])
