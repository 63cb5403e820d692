"""Folders of checkpoints, and how a new one replaces an old one."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
"""Files that are copied from one checkpoint to the next."""

MORE_TEMPLATES = "additional_chat_templates"
"""A folder of chat templates, one in each file, which is copied as well."""

_BELONGS = re.compile(r"config\.json|.*\.safetensors(\.index\.json)?")


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or a folder cannot be replaced by one."""


@contextlib.contextmanager
def replaced_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Makes an empty folder that replaces `folder` when the context ends without an error.

    Until then `folder` does not change. The old folder is renamed to `.NAME.old`, and removed when the new one is in
    its place. If the process is killed in between, `recover` restores it. Raises CheckpointError as
    `check_replaceable`.
    """
    folder = pathlib.Path(os.path.abspath(folder))
    recover(folder)
    check_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = pathlib.Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".new", dir=folder.parent))
    try:
        yield staging
        for path in staging.rglob("*"):
            if path.is_file():
                with path.open("rb+") as file:
                    os.fsync(file.fileno())  # the error of a full disk may come only here
        staging.chmod(0o755)
        if folder.exists():
            folder.rename(_old(folder))
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        _recover(folder)


def recover(folder: str | pathlib.Path) -> None:
    """Restores a checkpoint whose replacement was interrupted, and warns; or removes the one that was replaced.

    If `folder` does not exist, `.NAME.old` is renamed to it; if it does, `.NAME.old` is removed.
    """
    folder = pathlib.Path(os.path.abspath(folder))
    if _recover(folder):
        warnings.warn(
            f"A save to {folder} was interrupted. The checkpoint before it was restored from {_old(folder).name}.",
            stacklevel=2,
        )


def _recover(folder: pathlib.Path) -> bool:
    """Returns whether the old folder was restored."""
    old = _old(folder)
    if not old.is_dir() or not all(map(_belongs, old.iterdir())):
        return False
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        return False
    old.rename(folder)
    return True


def _old(folder: pathlib.Path) -> pathlib.Path:
    return folder.parent / f".{folder.name}.old"


def check_replaceable(folder: pathlib.Path) -> None:
    """Raises CheckpointError if a folder holds files that do not belong to a checkpoint. It need not exist."""
    foreign = [] if not folder.exists() else sorted(p.name for p in folder.iterdir() if not _belongs(p))
    if foreign:
        raise CheckpointError(
            f"`folder` must be new, empty or a checkpoint, since all of it is replaced. {folder} holds "
            f"{', '.join(foreign)}. Choose another folder, or move these files."
        )


def copy_tokenizer(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies the files of the tokenizer and the generation settings, if there are any."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    if (source / MORE_TEMPLATES).is_dir():
        shutil.copytree(source / MORE_TEMPLATES, target / MORE_TEMPLATES)


def remedy_of_missing(folder: str | pathlib.Path) -> str:
    """The remedy for a folder without a checkpoint: for a name as on the Hugging Face hub, the command to download it.

    Example:
        >>> remedy_of_missing("google/gemma-3-1b-it")
        'Pass a checkpoint. From the Hugging Face hub: hf download google/gemma-3-1b-it --local-dir gemma-3-1b-it'
    """
    name = str(folder)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) or pathlib.Path(name).exists():
        return "Pass the folder of a checkpoint."
    return f"Pass a checkpoint. From the Hugging Face hub: hf download {name} --local-dir {name.partition('/')[2]}"


def refuse_adapter(folder: str | pathlib.Path) -> None:
    """Raises CheckpointError for a folder with an adapter of the package peft, whether it holds a model or not."""
    if (path := pathlib.Path(folder) / "adapter_config.json").exists():
        raise CheckpointError(
            f"{folder} holds an adapter, {path.name}, which is not applied here. Merge it into the model with "
            "`merge_and_unload` of the package peft, and save that."
        )


def read_optional_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads the object of a JSON file, an empty one without a file. Raises CheckpointError if it holds no object."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}. Download it again, or remove it.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object. Got {type(content).__name__}. Download it again.")
    return content


def _belongs(path: pathlib.Path) -> bool:
    if path.name == MORE_TEMPLATES:
        return path.is_dir() and all(file.suffix == ".jinja" for file in path.iterdir())
    return path.is_file() and (path.name in TOKENIZER_FILES or _BELONGS.fullmatch(path.name) is not None)
