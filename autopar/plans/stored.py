"""Conversion between plans and the data of their JSON files.

The annotations of the dataclasses describe the format. `cattrs` builds and checks the objects;
this module adds hooks for layouts and meshes, which are stored as text and as `Mesh.to_json`, and
makes numbers, texts and booleans strict. A field that is unknown, missing, of another type, or not
in the form in which it would be written is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import cattrs
from cattrs.cols import homogenous_tuple_structure_factory, mapping_structure_factory
from cattrs.gen import (
    make_dict_structure_fn,
    make_dict_unstructure_fn,
    make_hetero_tuple_structure_fn,
    override,
)
from cattrs.strategies import configure_union_passthrough

from autopar.core.layout import Layout
from autopar.core.mesh import Mesh
from autopar.plans.parts import Entry, Kept

T = TypeVar("T")
Hook = Callable[[Any, Any], Any]
_SEPARATOR = " @ $"  # between what is wrong and its path, in the messages of cattrs


def to_data(value: Any) -> Any:
    """Return the data of a plan, or of a part of one, as `json.dumps` takes them."""
    return _CONVERTER.unstructure(value)


def from_data(data: Any, kind: type[T], path: str = "") -> T:
    """Make a plan, or a part of one, from its data.

    Args:
        data: the data, as `autopar.core.json_text.read_json` returns them.
        kind: the type of the result.
        path: path of the data in the file, for the message.

    Raises:
        ValueError: if a field is missing, unknown, or has another type; the message names the first
            such field by its path.
    """
    try:
        return _CONVERTER.structure(data, kind)
    except (cattrs.BaseValidationError, TypeError, ValueError) as error:
        raise ValueError(_first_message(error, path)) from error


def _first_message(error: Exception, start: str) -> str:
    """The first error with its path: ``proof.gap must be a number, not 'x'``."""
    message = cattrs.transform_error(error, format_exception=_format)[0]
    fault, _, path = message.partition(_SEPARATOR)
    return f"{(start + path).lstrip('.') or 'it'} {fault}"


def _format(error: BaseException, kind: type | None) -> str:
    """One error, as a sentence whose subject is the field."""
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        return f"has the unknown field {min(error.extra_fields)!r:.80}"
    if isinstance(error, KeyError):
        return "is missing"
    return str(error)


def _strict(name: str, *kinds: type, read: Hook | None = None) -> Hook:
    """A hook that takes only data of `kinds`, and passes them to `read`. A bool is not an int."""

    def read_checked(value: Any, kind: Any) -> Any:
        if type(value) not in kinds:
            raise ValueError(f"must be {name}, not {value!r:.60}")
        return read(value, kind) if read else value

    return read_checked


def _tuple_hook(kind: Any, converter: cattrs.Converter) -> Hook:
    """Tuples are stored as lists."""
    args = get_args(kind)
    if args[-1:] == (...,):
        return _strict("a list", list, read=homogenous_tuple_structure_factory(kind, converter))
    read = make_hetero_tuple_structure_fn(kind, converter)

    def read_checked(value: Any, _: Any) -> Any:
        if len(value) != len(args):
            raise ValueError(f"must have {len(args)} values, not {value!r:.60}")
        return read(value, kind)

    return _strict("a list", list, read=read_checked)


def _mapping_hook(kind: Any, converter: cattrs.Converter) -> Hook:
    return _strict("an object", dict, read=mapping_structure_factory(kind, converter))


def _dataclass_hook(kind: Any, converter: cattrs.Converter) -> Hook:
    read = make_dict_structure_fn(kind, converter, _cattrs_forbid_extra_keys=True)
    return _strict("an object", dict, read=read)


def _literal_hook(kind: Any, _: cattrs.Converter) -> Hook:
    known = get_args(kind)

    def read(value: Any, _: Any) -> Any:
        if value not in known:
            raise ValueError(f"must be one of {', '.join(map(repr, known))}, not {value!r:.60}")
        return value

    return read


def _is_integer_or_word(kind: Any) -> bool:
    """Whether a type is an integer or one of a few words, as ``int | Literal["auto"]`` is."""
    if get_origin(kind) is not Union:
        return False
    return [get_origin(arg) or arg for arg in get_args(kind)] == [int, Literal]


def _integer_or_word_hook(kind: Any, _: cattrs.Converter) -> Hook:
    known = get_args(get_args(kind)[1])

    def read(value: Any, _: Any) -> Any:
        if type(value) is int or (type(value) is str and value in known):
            return value
        words = ", ".join(map(repr, known))
        raise ValueError(f"must be an integer or {words}, not {value!r:.60}")

    return read


def _read_layout(text: Any, _: Any) -> Layout:
    layout = Layout.parse(_TEXT(text, str))
    if str(layout) != text:
        raise ValueError(f"is {text!r:.60}, which must be written {str(layout)!r}")
    return layout


def _read_mesh(data: Any, _: Any) -> Mesh:
    try:
        mesh = Mesh.from_json(data)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"is not a mesh: {type(error).__name__}: {error}") from error
    if mesh.to_json() != data:
        raise ValueError(f"must be {mesh.to_json()}, not {data!r:.80}")
    return mesh


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter()
    converter.register_structure_hook_factory(is_dataclass, _dataclass_hook)
    converter.register_structure_hook_factory(lambda kind: get_origin(kind) is tuple, _tuple_hook)
    converter.register_structure_hook_factory(
        lambda kind: get_origin(kind) is Literal, _literal_hook
    )
    converter.register_structure_hook_factory(
        lambda kind: get_origin(kind) is Mapping, _mapping_hook
    )
    converter.register_structure_hook(str, _TEXT)
    converter.register_structure_hook(bool, _strict("true or false", bool))
    converter.register_structure_hook(int, _strict("an integer", int))
    converter.register_structure_hook(float, _strict("a number", float, int))
    converter.register_structure_hook(Layout, _read_layout)
    converter.register_unstructure_hook(Layout, str)
    converter.register_structure_hook(Mesh, _read_mesh)
    converter.register_unstructure_hook(Mesh, Mesh.to_json)
    # most have the default value, and earlier versions do not know these fields
    rare = override(omit_if_default=True)
    converter.register_unstructure_hook(
        Entry, make_dict_unstructure_fn(Entry, converter, fallbacks=rare)
    )
    converter.register_unstructure_hook(
        Kept, make_dict_unstructure_fn(Kept, converter, is_copy=rare)
    )
    configure_union_passthrough(str | bool | int | float | None, converter)
    converter.register_structure_hook_factory(_is_integer_or_word, _integer_or_word_hook)
    return converter


_TEXT = _strict("a text", str)
_CONVERTER = _make_converter()
