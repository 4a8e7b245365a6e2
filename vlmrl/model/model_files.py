"""What a model's files may name: transformers opens whatever they say, also in other folders."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoVideoProcessor, PreTrainedTokenizerBase
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES
from transformers.utils import (
    CONFIG_NAME,
    IMAGE_PROCESSOR_NAME,
    PROCESSOR_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    VIDEO_PROCESSOR_NAME,
    WEIGHTS_INDEX_NAME,
)
from transformers.utils.hub import cached_file
from transformers.utils.import_utils import DummyObject
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

from vlmrl.families import FAMILIES
from vlmrl.utils.json_files import read_object

TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
SPECIAL_TOKENS_NAME = "special_tokens_map.json"
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}


def check_weight_files(path: str) -> None:
    """Raises ValueError unless the weights of a model, in a folder or under a hub name, are in its own files, under usual names."""
    if _found(path, ADAPTER_CONFIG_NAME) is not None:
        raise ValueError(
            f"model.path {path!r} has adapters of its own ({ADAPTER_CONFIG_NAME}), which transformers would add to the weights, or to "
            "those of another model that it names: merge them (merge_and_unload of peft), or remove the file."
        )
    # each name asks the hub, which may be out of reach
    for name in [SAFE_WEIGHTS_INDEX_NAME] + [WEIGHTS_INDEX_NAME] * Path(path).is_dir():
        if _found(path, name) is not None:
            named = _object(path, name).get("weight_map")
            _check_own(path, f"the weight_map of its {name}", named.values() if isinstance(named, dict) else [named])


def check_config_file(path: str) -> None:
    """Raises ValueError if the ``config.json`` of a model names files for versions of transformers: it would read one of them in place
    of ``config.json``, which is what is checked."""
    if "configuration_files" in _object(path, CONFIG_NAME):
        raise ValueError(
            f"model.path {path!r}: its config.json must not have configuration_files, which names files that are read in its place: "
            "remove it, and call the file that you mean config.json."
        )


def check_config(path: str, config: Any) -> None:
    """Raises ValueError if the ``config`` of a model, of transformers, has quantized weights, or names a file of weights or of code.

    Quantized weights are not trained, and neither saved nor sent in that form. A file of weights may be an index of other files.
    """
    _check_no_source(path, CONFIG_NAME, getattr(config, "_auto_class", None))
    for part in _parts(config):
        if (quantized := getattr(part, "quantization_config", None)) is not None:
            method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
            raise ValueError(
                f"model.path {path!r} must not have quantized weights, but its config.json has a quantization_config "
                f"({method!s:.50}): take the model with weights in bfloat16, float16 or float32. A teacher may be on a server instead."
            )
    if getattr(config, "transformers_weights", None) is not None:
        raise ValueError(
            f"model.path {path!r}: its config.json must not have transformers_weights, which names weights that servers do not "
            "read: remove it, and name that file model.safetensors, or model.safetensors.index.json for an index."
        )


def _check_no_source(path: str, file: str, auto_class: object) -> None:
    """Raises ValueError if a ``file`` of a model's settings sets ``_auto_class``.

    transformers would copy the source file of the module that they name as ``__module__``, which may be the user's own, into each
    folder to which the model is saved.
    """
    if auto_class is not None:
        raise ValueError(
            f"model.path {path!r}: its {file} must not have _auto_class, by which source files of this machine would become a part of "
            "the saved model: remove it."
        )


def forget_code(config: Any) -> None:
    """Remove from a ``config``, of transformers, the code that it names: a model makes a part of it, such as SmolVLM's text model, by
    the part's own type, and transformers asks on the terminal whether to run the code of a type for which it has no model."""
    for part in _parts(config):
        vars(part).pop("auto_map", None)


def _parts(config: Any) -> Iterator[Any]:
    """A config and those of all its parts."""
    yield config
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            yield from _parts(part)


def check_tokenizer_files(path: str, config: Any) -> None:
    """Raises ValueError if the tokenizer of a model, in a folder or under a hub name, names a file elsewhere, or a class that is none.

    Such a class may ask on the terminal whether to run code of the folder. ``config`` is the model's, of transformers.
    """
    folder = Path(os.path.realpath(path))
    settings = _object(path, TOKENIZER_CONFIG_NAME)
    if Path(path).is_dir():
        found = settings.get("fast_tokenizer_files", [])
        named = found if isinstance(found, list) else [found]
        _check_own(path, f"fast_tokenizer_files in its {TOKENIZER_CONFIG_NAME}", named)
        _check_links(folder, named)
    _check_special_tokens(path)
    # With a tokenizer.json transformers reads no other file, whatever older settings name.
    is_complete = _found(path, "tokenizer.json") is not None
    for name, value in settings.items():
        is_file = name.endswith("_file") and name != "special_tokens_map_file"
        if name in ("vocab", "merges", "gguf_file") or (is_file and not is_complete):
            _check_no_file_elsewhere(path, folder, name, value)
        elif name == "init_inputs" or name.endswith("_kwargs"):
            for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]:
                _check_no_file_elsewhere(path, folder, name, each)
    _check_tokenizer_class(path, TOKENIZER_CONFIG_NAME, settings.get("tokenizer_class"))
    _check_tokenizer_class(path, CONFIG_NAME, getattr(config, "tokenizer_class", None))


def _check_no_file_elsewhere(path: str, folder: Path, name: str, value: object) -> None:
    """Raises ValueError if a value of a tokenizer's setting is the path of a file outside of the model's folder.

    transformers would read it as the vocabulary, which becomes a part of the saved model. Settings of old models name files of the
    machine that saved them, which do not exist here.
    """
    if not isinstance(value, str):
        return
    for place in (Path(value), folder / value):  # transformers looks for a GGUF file in the folder
        try:
            real = Path(os.path.realpath(place, strict=True))
        except (OSError, ValueError):  # there is no such file
            continue
        if not real.is_dir() and not _is_own(folder, real):
            raise ValueError(
                f"model.path {path!r}: {name} in its {TOKENIZER_CONFIG_NAME} must not name a file outside of its folder, but it names "
                f"{value[:200]!r}, whose content would become a part of the saved model: remove {name}."
            )


def _check_special_tokens(path: str) -> None:
    """Raises ValueError if the special tokens of a model's tokenizer come with other settings.

    transformers would take those after the settings in ``tokenizer_config.json``, such as a ``vocab_file`` to read.
    """
    for name in _object(path, SPECIAL_TOKENS_NAME):
        if not name.endswith(("_token", "_tokens")):
            raise ValueError(
                f"model.path {path!r}: its {SPECIAL_TOKENS_NAME} must have special tokens alone, but it has {name[:200]!r}, which "
                "would be a setting of the tokenizer, such as a file to read: remove it."
            )


def _check_tokenizer_class(path: str, file: str, name: object) -> None:
    """Raises ValueError if a class that transformers has under this name is no tokenizer: it would load it all the same."""
    if not isinstance(name, str):
        return
    for each in (name, name.removesuffix("Fast"), f"{name}Fast"):
        found = tokenizer_class_from_name(each)
        if found is not None and not isinstance(found, DummyObject) and not _is_tokenizer(found):
            raise ValueError(
                f"model.path {path!r}: tokenizer_class in its {file} must be a tokenizer of transformers, but it is {name[:200]!r}: "
                "remove it, or name TokenizersBackend."
            )


def _is_tokenizer(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase)


def _check_links(folder: Path, named: Iterable[str]) -> None:
    """Raises ValueError for a link to a text elsewhere: template and tokens, of files that are ``named``, too, become a part of the
    saved model."""
    for path in (*folder.iterdir(), *folder.glob("additional_chat_templates/*"), *(folder / name for name in named)):
        real = Path(os.path.realpath(path))
        if path.suffix not in WEIGHTS and not _is_own(folder, real):
            raise ValueError(
                f"model.path {str(folder)!r}: {path.name} must be in the folder, but it is a link to {real}, whose "
                "content would become a part of the saved model: copy the file there, if you mean it."
            )


def _is_own(folder: Path, real: Path) -> bool:
    """Whether ``real``, a path without links, is in a model's folder.

    The hub's cache keeps the content of a model's files in a folder ``blobs``, to which they are links.
    """
    return real.is_relative_to(folder) or real.parent.name == "blobs"


def check_processors(path: str, *more: str) -> None:
    """Raises ValueError if the settings of a model's image processor, or those in ``more`` files, name a class of transformers that
    no family's models have, or have the source of a class saved.

    Such a class may save files elsewhere with the trained model, as Ernie's video processor does with its font, or ask on the terminal
    whether to run code of the folder, as AutoFeatureExtractor does.
    """
    for file in (CONFIG_NAME, PROCESSOR_NAME, IMAGE_PROCESSOR_NAME, *more):
        settings = _object(path, file)
        for part in (settings, *(each for each in settings.values() if isinstance(each, dict))):
            _check_no_source(path, file, part.get("_auto_class"))
            for key, name in part.items():
                is_class = key.endswith("_processor_type") or key == "feature_extractor_type"
                if is_class and isinstance(name, str) and _is_foreign_processor(name):
                    raise ValueError(
                        f"model.path {path!r}: {key} in its {file} must be a processor of a model type that is supported, but it is "
                        f"{name[:200]!r}, which may read other files or run code: remove {key}, or download the model again, from a "
                        "source that you trust."
                    )


def _is_foreign_processor(name: str) -> bool:
    """Whether transformers has a class of this name, or of one that it makes of it, but no family's models have it.

    A name that transformers does not know is its own error.
    """
    image = name.replace("FeatureExtractor", "ImageProcessor")
    for each in (name, image, image.replace("ImageProcessor", "VideoProcessor")):
        plain = each.removesuffix("Fast").removesuffix("Pil")
        is_known = any(hasattr(transformers, plain + suffix) for suffix in ("", "Fast", "Pil"))
        if is_known and plain not in _processors_of_families():
            return True
    return False


def _processors_of_families() -> set[str]:
    """The names of the processors of all families' models, without the suffixes of their variants."""
    found: set[str] = set()
    for mapping in (IMAGE_PROCESSOR_MAPPING_NAMES, VIDEO_PROCESSOR_MAPPING_NAMES):
        for kind in FAMILIES:
            classes: Any = mapping.get(kind) or ()
            names = (
                classes.values() if isinstance(classes, dict) else [classes] if isinstance(classes, str) else classes
            )
            found |= {str(name).removesuffix("Fast").removesuffix("Pil") for name in names}
    return found


def load_video_processor(path: str) -> Any:
    """A model's video processor, which is saved with the trained model: a server's AutoProcessor needs it.

    Raises:
        ValueError: it cannot be loaded, which is better known before the training than after it.
    """
    check_processors(path, VIDEO_PROCESSOR_NAME)
    try:
        return AutoVideoProcessor.from_pretrained(path, trust_remote_code=False)
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        cause = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(
            f"model.path {path!r}: its video processor, which is saved with the trained model, cannot be loaded: "
            f"{cause:.200} Correct its processor_config.json, or its "
            "video_preprocessor_config.json or preprocessor_config.json without one."
        ) from error


def _check_own(path: str, what: str, names: Iterable[object]) -> None:
    for named in {each if isinstance(each, str) else repr(each) for each in names}:
        if not _is_own_file(Path(path), named):
            raise ValueError(
                f"model.path {path!r}: {what} must name regular files in its folder, but it names {named[:200]!r}: download the model "
                "again, from a source that you trust."
            )


def _is_own_file(folder: Path, name: str) -> bool:
    """Whether a name leads to a regular file below the folder, which is unknown where ``folder`` is a hub name."""
    is_below = not Path(name).is_absolute() and ".." not in Path(name).parts
    return is_below and (not folder.is_dir() or (folder / name).is_file())


def _found(path: str, name: str) -> str | None:
    return cached_file(path, name, _raise_exceptions_for_missing_entries=False)


def _object(path: str, name: str) -> dict[str, Any]:
    """The object in a JSON file of the model; an empty one if there is no such file. Raises ValueError for anything else."""
    file = _found(path, name)
    found = {} if file is None else read_object(Path(file))
    if found is None:
        raise ValueError(f"model.path {path!r}: its {name} must be a JSON object of at most 64 MiB.")
    return found
