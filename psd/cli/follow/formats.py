"""The files of one version: names, and bytes, of its tensors as transformers, vLLM and others read them.

Tensors are written under their names, in the dtypes that the job declared: what shards hold in float32 for a worker's float16
or bfloat16 is rounded to nearest even. Must not know directories, nor where versions come from.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psd.checkpoint import safetensors
from psd.checkpoint.export import CONFIG_FILE, ELEMENT_TYPES, WEIGHTS_FILE, converted
from psd.checkpoint.storage import Chunk
from psd.contract.config import ConfigError

ADAPTER_FILE, ADAPTER_CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
"""Files of a directory that PEFT's `from_pretrained`, vLLM and SGLang take."""

ADAPTER = "default"
"""Name of an adapter in PEFT, if the program gives it none. It is in the names of tensors, but not in files."""


@dataclass(frozen=True)
class PulledVersion:
    """One version of a job's tensors.

    Attributes:
        job: name of the job. timeline: how often it had gone back to a checkpoint.
        tensors: values by name, in the job's order; float32 for float16 and bfloat16. dtypes: declared dtypes by name.
        meta, digest: as in Weights.
    """

    job: str
    timeline: int
    version: int
    tensors: Mapping[str, NDArray[Any]]
    dtypes: Mapping[str, str]
    meta: Any = None
    digest: str = ""

    @property
    def meta_in_json(self) -> Any:
        """The meta as a value of JSON: bytes in hexadecimal digits."""
        return self.meta.hex() if isinstance(self.meta, bytes) else self.meta


class Format(Protocol):
    """A way to write a version.

    Attributes:
        word: its name.
    """

    word: str

    def names(self, tensors: Iterable[str]) -> dict[str, str]:
        """The tensors that are written, each with its name in the file. ConfigError: two would have the same."""
        ...

    def files(self, pulled: PulledVersion) -> dict[str, Iterable[Chunk]]:
        """The files by name."""
        ...


class SafetensorsFormat(Format):
    """`model.safetensors`, and `config.json` if one is given.

    Args:
        config: path of a config.json, as model.config.save_pretrained writes it; empty: none.

    Raises:
        ConfigError: the file cannot be read, or holds no JSON object.
    """

    word = "safetensors"

    def __init__(self, config: str = "") -> None:
        self._config: dict[str, Iterable[Chunk]] = {CONFIG_FILE: [_json_file("--config", config)]} if config else {}

    @override
    def names(self, tensors: Iterable[str]) -> dict[str, str]:
        return {name: name for name in tensors}

    @override
    def files(self, pulled: PulledVersion) -> dict[str, Iterable[Chunk]]:
        return {WEIGHTS_FILE: _safetensors(pulled, self.names(pulled.tensors)), **self._config}


class PeftFormat(Format):
    """`adapter_model.safetensors` and `adapter_config.json`.

    Written are the tensors that have the adapter's name in theirs, without it, as PEFT does; all, if none has it: then they are
    named as in a file already.

    Args:
        config: path of an adapter_config.json, as PEFT's save_pretrained writes it. adapter: name of the adapter.

    Raises:
        ConfigError: the file cannot be read, or is no such file.
    """

    word = "peft"

    def __init__(self, config: str, adapter: str = ADAPTER) -> None:
        self._config = _json_file("--adapter-config", config)
        if "peft_type" not in json.loads(self._config):
            raise ConfigError(f"--adapter-config: {config}: has no peft_type, so it is no adapter_config.json of PEFT's")
        self._adapter = adapter

    @override
    def names(self, tensors: Iterable[str]) -> dict[str, str]:
        known = list(tensors)
        own = {name: in_file for name in known if (in_file := name_in_file(name, self._adapter)) != name}
        named = own or {name: name for name in known}
        twice = [name for name, count in Counter(named.values()).items() if count > 1]
        if twice:
            raise ConfigError(f"--adapter: {self._adapter!r}: two tensors would be called {twice[0]!r}")
        return named

    @override
    def files(self, pulled: PulledVersion) -> dict[str, Iterable[Chunk]]:
        return {ADAPTER_FILE: _safetensors(pulled, self.names(pulled.tensors)), ADAPTER_CONFIG_FILE: [self._config]}


def name_in_file(name: str, adapter: str) -> str:
    """The name in an adapter's file of a model's tensor: without the adapter's; unchanged if that is not in it.

    PEFT names them so: "q.lora_A.default.weight" is written as "q.lora_A.weight", "q.lora_embedding_A.default" as
    "q.lora_embedding_A", "score.modules_to_save.default.weight" as "score.weight".
    """
    words = name.split(".")
    if adapter not in words[1:]:
        return name
    place = len(words) - 1 - words[::-1].index(adapter)
    before = words[:place]
    if before[-1] == "modules_to_save":
        before = before[:-1]
    after = words[place + 1 :]
    if before and before[-1] == "lora_magnitude_vector":
        after = []  # a parameter in files, though a module in the model
    return ".".join([*before, *after])


def _json_file(option: str, path: str) -> bytes:
    try:
        content = Path(path).read_bytes()
        is_object = isinstance(json.loads(content), dict)
    except OSError as error:
        raise ConfigError(f"{option}: cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise ConfigError(f"{option}: {path} holds no JSON object")
    return content


def _safetensors(pulled: PulledVersion, named: Mapping[str, str]) -> Iterator[Chunk]:
    """A safetensors file of these tensors, each under the name that it is to have."""
    # Wide elements first, so that each tensor starts on a multiple of its item size.
    element = {name: ELEMENT_TYPES[pulled.dtypes[name]] for name in named}
    names = sorted(named, key=lambda name: -safetensors.ITEM_BYTES[element[name]])
    entries = safetensors.lay_out((named[name], element[name], pulled.tensors[name].shape) for name in names)
    # "pt" says that weights are laid out as in torch; the transformers library requires it.
    metadata = {"format": "pt", "psd_job": pulled.job, "psd_version": str(pulled.version)}
    yield safetensors.header(entries, metadata)
    for name in names:
        values = np.ascontiguousarray(converted(pulled.tensors[name], pulled.dtypes[name]))
        yield values.reshape(-1).view(np.uint8).data
