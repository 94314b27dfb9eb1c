"""Values of a checkpoint as JSON: nothing is pickled, and reading one runs no code.

Numbers, texts, lists, and dicts whose keys are texts stand in the JSON as they are. Any other value
is an object with one key, which begins with ``!`` and names its kind: ``{"!tuple": [1, 2]}``.
Tensors stand in a file of tensors; the JSON has ``{"!tensor": [device type, dtype, shape]}`` in
their place, and their name in the file is their path in the value. Of a distributed tensor it has
``{"!sharded": [dtype, shape]}``; each rank writes its part, as of parameters.
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

# of lists and dicts in each other; `autopar.core.json_text` reads three times as many brackets
MOST_LEVELS = 30
_BITS = 63
_TAG = "!"
Keys = tuple[str | int, ...]
Find = Callable[[str, torch.dtype, torch.Size, bool], Tensor]


class Tensors(dict[str, Tensor]):
    """The plain tensors of a value, by name.

    Attributes:
        sharded: the distributed ones, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sharded: dict[str, DTensor] = {}


def encode(value: Any, path: Keys, tensors: Tensors | None = None) -> Any:
    """Write a value as JSON data.

    Args:
        value: made of tensors, numpy's arrays, numbers, texts, bytes, lists, tuples, sets, dicts,
            dtypes and devices.
        path: where it stands, for errors and for names of tensors.
        tensors: takes its tensors, by name; without it tensors are refused.

    Returns:
        What `json.dumps` takes.

    Raises:
        RuntimeStateError: if a part of it cannot be written. The message names the part.
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
    """Read what `encode` wrote.

    Args:
        data: what the JSON says.
        path: as `encode` had it.
        find: reads a tensor of a name, a dtype and a shape, or gives what stands for it where it is
            distributed, as the last argument says; without it there are none.

    Raises:
        ValueError: if it is not what `encode` writes. The message names the part.
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
        raise ValueError(f"{say_path(path)} is of an unknown kind: {', '.join(data):.40}")
    try:
        return decoder(content, path, find)
    except (TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"{say_path(path)} is not a {tag.removeprefix(_TAG)} ({error})") from error


def name_tensor(path: Keys) -> str:
    """The name of a tensor in its file.

    Args:
        path: where it stands in the value.
    """
    return json.dumps(path)


def say_path(path: Keys) -> str:
    """A path for people: ``scheduler['betas'][0]``."""
    return str(path[0]) + "".join(f"[{each!r}]" for each in path[1:]) if path else "the value"


def _refuse(path: Keys, fault: str) -> RuntimeStateError:
    remedy = (
        "let its state_dict return tensors, arrays, numbers, texts, bytes, lists, tuples, sets and"
        " dicts"
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
    """An array of numpy, as a tensor."""
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
        return {tag: _encode_list(list(value), path, tensors)}

    return encoder


def _encode_pairs(tag: str) -> Callable[..., Any]:
    def encoder(value: Mapping[Any, Any], path: Keys, tensors: Tensors | None) -> Any:
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
        if type(content) is not str:
            raise TypeError("a text is expected")
        return make(content)

    return decoder


def _decode_items(make: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    def decoder(content: Any, path: Keys, find: Find | None) -> Any:
        if type(content) is not list:
            raise TypeError("a list is expected")
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
        raise TypeError(f"{name!r:.40} is not one")
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
