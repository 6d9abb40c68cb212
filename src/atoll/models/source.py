"""Where a model comes from: a folder, a name on the hub, or a configuration alone."""

from pathlib import Path
from typing import Any

from atoll.data.sources.hub_reach import use_cache_if_unreachable
from atoll.errors import UserError, first_line
from atoll.settings import Model, check_stored_weights

HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
EVERY_FILE = (*HUB_FILES, "pytorch_model*.bin")


def local_folder(source: str, revision: str | None) -> Path:
    """The folder of a model: `source` itself, or the hub's copy in the local cache.

    Downloads only where HF_HUB_OFFLINE is unset. Raises `UserError` if there is no copy to be had.
    """
    return Path(source) if Path(source).is_dir() else snapshot(source, revision, None, HUB_FILES)


def source_folder(model: Model) -> Path | None:
    """The folder that a run's weights begin from, where they begin from any."""
    return None if model.source is None else local_folder(model.source, model.revision)


def snapshot(
    source: str, revision: str | None, into: Path | None, patterns: tuple[str, ...]
) -> Path:
    """A model of the hub in a folder, or (None) in the local cache; goes on where it stopped.

    A gated model needs a token, which the hub's library takes from HF_TOKEN or HF_TOKEN_PATH.
    Raises `UserError` where it may not be had, naming the page to ask on.
    """
    is_away = use_cache_if_unreachable()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError

    try:
        folder = snapshot_download(
            source, revision=revision, local_dir=into, allow_patterns=list(patterns)
        )
    except GatedRepoError:
        raise UserError(
            f"the hub does not give {source} to whoever asks: its licence must be accepted first",
            f"ask on https://huggingface.co/{source}, then export HF_TOKEN (or HF_TOKEN_PATH)",
        ) from None
    except Exception as error:
        raise UserError(
            f"model {source!r} is no folder here and cannot be had from the hub "
            f"({'which does not answer from here' if is_away else type(error).__name__})",
            "where there is a network make a bundle, `atoll prepare --into BUNDLE …`, and give "
            "folders.bundle=BUNDLE here; or give model.source as a folder",
        ) from error
    return Path(folder)


def load_config(model: Model, special_ids: dict[str, int]) -> Any:
    """The Hugging Face configuration: the source's, with `model.config` laid over it.

    special_ids: bos, eos and pad of the tokenizer, for a model that starts from nothing.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    overrides = dict(model.config)
    if model.source is None:
        try:
            return AutoConfig.for_model(**(special_ids | overrides))
        except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
            reason = first_line(error.__cause__ or error)
            raise UserError(
                f"model.config makes no model: {reason}", "correct model.config"
            ) from error
    config = _config_of_folder(local_folder(model.source, model.revision), overrides)
    check_stored_weights(model.source, getattr(config, "quantization_config", None))
    return config


def _config_of_folder(folder: Path, overrides: dict[str, Any]) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise UserError(f"no config.json in {folder}", "give the folder of a Hugging Face model")
    overrides = {name: value for name, value in overrides.items() if name != "model_type"}
    overrides["trust_remote_code"] = False
    try:
        return AutoConfig.from_pretrained(folder, **overrides)
    except ValueError as error:
        raise UserError(
            f"{folder}: {first_line(error)}", "its code is never run: choose a model without any"
        ) from error
    except StrictDataclassError as error:
        raise UserError(
            f"{folder}: {first_line(error.__cause__ or error)}",
            "correct config.json or model.config",
        ) from error
