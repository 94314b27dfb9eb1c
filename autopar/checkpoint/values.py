"""Conversion of a checkpoint's values to JSON and back. No pickles are used, and reading a value
runs no code.

Numbers, strings, lists, and dicts with string keys are written as the same JSON types. Any other
value is written as an object with one key, which begins with ``!`` and names the type of the value:
``{"!tuple": [1, 2]}``. Tensors are stored in a tensor file, named by their path in the value. The
JSON contains ``{"!tensor": [device type, dtype, shape]}`` for a plain tensor, and
``{"!sharded": [dtype, shape]}`` for a distributed tensor. Each rank writes its shard of a
distributed tensor, like that of a parameter.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import RuntimeStateError

# The limit of nested lists and dicts. `autopar.core.json_text` accepts three times as many levels.
MOST_LEVELS = 30
_BITS = 63
_TAG = "!"
Keys = tuple[str | int, ...]
Find = Callable[[str, torch.dtype, torch.Size, bool], Tensor]


class Tensors(dict[str, Tensor]):
    """The plain tensors of a value, by name.

    Attributes:
        sharded: the distributed tensors, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sharded: dict[str, DTensor] = {}


def encode(value: Any, path: Keys, tensors: Tensors | None = None) -> Any:
    """Convert a value to JSON data.

    Args:
        value: a value that consists of tensors, numpy arrays, numbers, strings, bytes, lists,
            tuples, sets, dicts, dtypes and devices.
        path: the keys that lead to the value, for error messages and for names of tensors.
        tensors: receives the tensors, by name; if None, tensors are refused.

    Returns:
        Data for `json.dumps`.

    Raises:
        RuntimeStateError: if a part of the value cannot be converted. The message names the part.
    """
    if len(path) > MOST_LEVELS:
        raise _refuse(path, f"is nested more than {MOST_LEVELS} levels deep")
    value = (
        value.item()
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
        else value
    )
    if value is None or type(value) in (bool, str):
        return value
    if isinstance(value, Tensor):
        return _encode_tensor(value, path, tensors)
    if (type(value).__module__, type(value).__name__) == ("numpy", "ndarray"):
        return _encode_array(value, path, tensors)
    for kind, encoder in _ENCODERS.items():
        if type(value) is kind:
            return encoder(value, path, tensors)
    raise _refuse(path, f"is a {type(value).__module__}.{type(value).__qualname__}")


def decode(data: Any, path: Keys, find: Find | None = None) -> Any:
    """Convert a result of `encode` to the value.

    Args:
        data: the JSON data.
        path: the path that was passed to `encode`.
        find: returns the tensor with a given name, dtype and shape. Its last argument is whether
            the tensor is distributed. If `find` is None, tensors are refused.

    Raises:
        ValueError: if the data is not a result of `encode`. The message names the part.
    """
    if data is None or type(data) in (bool, int, float, str):
        return data
    if type(data) is list:
        return [decode(each, (*path, index), find) for index, each in enumerate(data)]
    if not any(key.startswith(_TAG) for key in data):
        return {key: decode(each, (*path, key), find) for key, each in data.items()}
    tag, content = next(iter(data.items()))
    decoder = _DECODERS.get(tag)
    if len(data) != 1 or decoder is None:
        raise ValueError(f"{say_path(path)} has an unknown type: {', '.join(data):.40}")
    try:
        return decoder(content, path, find)
    except (TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"{say_path(path)} is not a {tag.removeprefix(_TAG)} ({error})") from error


def name_tensor(path: Keys) -> str:
    """Return the name of a tensor in its file.

    Args:
        path: the keys that lead to the tensor in the value.
    """
    return json.dumps(path)


def say_path(path: Keys) -> str:
    """Return a readable form of a path: ``scheduler['betas'][0]``."""
    return str(path[0]) + "".join(f"[{each!r}]" for each in path[1:]) if path else "the value"


def _refuse(path: Keys, fault: str) -> RuntimeStateError:
    remedy = (
        "let its state_dict return tensors, arrays, numbers, strings, bytes, lists, tuples, sets"
        " and dicts"
    )
    return RuntimeStateError(
        f"{say_path(path)} {fault}, which a checkpoint cannot hold without a pickle", remedy=remedy
    )


def _encode_tensor(value: Tensor, path: Keys, tensors: Tensors | None) -> Any:
    dtype, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
    if tensors is not None and isinstance(value, DTensor):
        tensors.sharded[name_tensor(path)] = value
        return {"!sharded": [dtype, shape]}
    if tensors is None or type(value) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise _refuse(path, f"is a {type(value).__name__}")
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise _refuse(
            path, f"is a tensor of layout {value.layout}, dtype {value.dtype}, on {value.device}"
        )
    tensors[name_tensor(path)] = value.detach()
    return {"!tensor": [value.device.type, dtype, shape]}


def _encode_array(value: Any, path: Keys, tensors: Tensors | None) -> Any:
    """Encode a numpy array as a tensor."""
    try:
        return {"!array": _encode_tensor(torch.from_numpy(value.copy()), path, tensors)}
    except TypeError:
        raise _refuse(path, f"is an array of {value.dtype}") from None


def _find(content: Any, path: Keys, find: Find | None, *, is_sharded: bool) -> Tensor:
    name, shape = content
    if (
        find is None
        or type(shape) is not list
        or not all(type(size) is int and 0 <= size < 2**62 for size in shape)
    ):
        raise TypeError("it has no shape")
    return find(name_tensor(path), _read_dtype(name), torch.Size(shape), is_sharded)


def _decode_tensor(content: Any, path: Keys, find: Find | None) -> Tensor:
    device, *of = content
    found = _find(of, path, find, is_sharded=False)
    return found.to(device) if device == "cuda" and torch.cuda.is_available() else found


def _decode_sharded(content: Any, path: Keys, find: Find | None) -> Tensor:
    return _find(content, path, find, is_sharded=True)


def _decode_array(content: Any, path: Keys, find: Find | None) -> Any:
    return _decode_tensor(content["!tensor"], path, find).numpy()


def _encode_int(value: int, path: Keys, tensors: Tensors | None) -> Any:
    return value if value.bit_length() <= _BITS else {"!int": hex(value)}


def _encode_float(value: float, path: Keys, tensors: Tensors | None) -> Any:
    return value if math.isfinite(value) else {"!float": str(value)}


def _encode_list(value: list[Any], path: Keys, tensors: Tensors | None) -> Any:
    return [encode(each, (*path, index), tensors) for index, each in enumerate(value)]


def _encode_dict(value: dict[Any, Any], path: Keys, tensors: Tensors | None) -> Any:
    if all(type(key) is str and not key.startswith(_TAG) for key in value):
        return {key: encode(each, (*path, key), tensors) for key, each in value.items()}
    return _encode_pairs("!dict")(value, path, tensors)


def _encode_items(tag: str) -> Callable[..., Any]:
    def encoder(value: Any, path: Keys, tensors: Tensors | None) -> Any:
        """Encode a collection as the list of its elements under the tag.

        Args:
            value: the collection.
            path, tensors: as for `encode`.
        """
        return {tag: _encode_list(list(value), path, tensors)}

    return encoder


def _encode_pairs(tag: str) -> Callable[..., Any]:
    def encoder(value: Mapping[Any, Any], path: Keys, tensors: Tensors | None) -> Any:
        """Encode a mapping as the list of its pairs under the tag.

        Args:
            value: the mapping.
            path, tensors: as for `encode`.
        """
        return {tag: _encode_list([list(pair) for pair in value.items()], path, tensors)}

    return encoder


_ENCODERS: Mapping[type, Callable[..., Any]] = {
    int: _encode_int,
    float: _encode_float,
    list: _encode_list,
    dict: _encode_dict,
    complex: lambda value, path, tensors: {
        "!complex": _encode_list([value.real, value.imag], path, tensors)
    },
    bytes: lambda value, path, tensors: {"!bytes": base64.b64encode(value).decode()},
    bytearray: lambda value, path, tensors: {"!bytearray": base64.b64encode(value).decode()},
    tuple: _encode_items("!tuple"),
    set: _encode_items("!set"),
    frozenset: _encode_items("!frozenset"),
    torch.Size: _encode_items("!size"),
    OrderedDict: _encode_pairs("!ordered"),
    Counter: _encode_pairs("!counter"),
    torch.dtype: lambda value, path, tensors: {"!dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value, path, tensors: {"!device": str(value)},
}


def _decode_text(make: Callable[[str], Any]) -> Callable[..., Any]:
    def decoder(content: Any, path: Keys, find: Find | None) -> Any:
        """Create a value from a string.

        Raises:
            TypeError: if the content is not a string.
        """
        if type(content) is not str:
            raise TypeError("expected a string")
        return make(content)

    return decoder


def _decode_items(make: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    def decoder(content: Any, path: Keys, find: Find | None) -> Any:
        """Create a value from the decoded elements of a list.

        Raises:
            TypeError: if the content is not a list.
        """
        if type(content) is not list:
            raise TypeError("expected a list")
        return make(decode(content, path, find))

    return decoder


def _decode_bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise TypeError(str(error)) from error


def _read_dtype(name: str) -> torch.dtype:
    found = vars(torch).get(name) if type(name) is str else None
    if not isinstance(found, torch.dtype):
        raise TypeError(f"unknown dtype {name!r:.40}")
    return found


def _read_complex(parts: list[Any]) -> complex:
    real, imaginary = parts
    return complex(real, imaginary)


def _read_count(pairs: list[Any]) -> Counter[Any]:
    return Counter(dict(pairs))


_DECODERS: Mapping[str, Callable[..., Any]] = {
    "!tensor": _decode_tensor,
    "!sharded": _decode_sharded,
    "!array": _decode_array,
    "!int": _decode_text(lambda text: int(text, 16)),
    "!float": _decode_text(float),
    "!complex": _decode_items(_read_complex),
    "!bytes": _decode_text(_decode_bytes),
    "!bytearray": _decode_text(lambda text: bytearray(_decode_bytes(text))),
    "!tuple": _decode_items(tuple),
    "!set": _decode_items(set),
    "!frozenset": _decode_items(frozenset),
    "!size": _decode_items(torch.Size),
    "!dict": _decode_items(dict),
    "!ordered": _decode_items(OrderedDict),
    "!counter": _decode_items(_read_count),
    "!dtype": _decode_text(_read_dtype),
    "!device": _decode_text(torch.device),
}
