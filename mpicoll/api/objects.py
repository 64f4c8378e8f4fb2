"""Collectives of objects: any object that pickle can serialize, without copies of the arrays inside the object.

Pickles of other ranks of the job are trusted like the program itself, unless a call has ``weights_only=True`` (torch 2.15).
"""

from __future__ import annotations

from typing import Any

from mpicoll.operations.prepare import objects


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    weights_only: bool = False,
    *,
    name: str | None = None,
) -> None:
    """Copy the objects of one rank's list into the list of all members.

    All members call this function with the same source and lists of the same length. Objects may have any type and size. Each
    array inside an object is received into memory of its own, and is writable unless it was read-only on the source.

    Args:
        object_list: on the source the objects to send; on other members a list whose elements are replaced.
        src: global rank of the source (default 0); or ``group_src``, its rank in the group.
        group: the group; default the world.
        device: accepted and ignored, as objects move through host memory.
        weights_only: load received objects only if they hold data: numbers, strings, bytes, list, tuple, dict, set, OrderedDict,
            Counter, NumPy arrays and dtypes, tensors of torch, and classes that ``torch.serialization.add_safe_globals`` added.
            The value must be the same on all members.
        name: as in :func:`mpicoll.broadcast`.

    Raises:
        TypeError: not a list.
        Exception: as pickle raises on the source (other members raise CollectiveMismatchError), or for an object that
            cannot be unpickled on that rank only, whose list is unchanged. The group can be used in both cases.
        pickle.UnpicklingError: with ``weights_only`` the object holds other things than data; on that rank only, as above.
        DistError: received bytes are no object of this call, as ranks made different calls that were not compared.
        Others as :func:`mpicoll.broadcast`.

    Source: torch.distributed.broadcast_object_list.
    """
    objects.broadcast(object_list, src, group, group_src, weights_only, name)


def all_gather_object(
    object_list: list[Any], obj: Any, group: Any = None, weights_only: bool = False, *, name: str | None = None
) -> None:
    """Gather one object of each member into ``object_list`` on all members.

    All members call this function. Objects may have any type and size; each rank also gets a copy of its own object. Arrays
    inside objects as in :func:`broadcast_object_list`.

    Args:
        object_list: a list with an element for each member, by rank in the group, which are replaced; others are unchanged.
        obj: this rank's object.
        group: the group; default the world.
        weights_only: as in :func:`broadcast_object_list`.
        name: as in :func:`mpicoll.broadcast`.

    Raises:
        TypeError, ValueError: not a list, or too short.
        Others as :func:`broadcast_object_list`.

    Source: torch.distributed.all_gather_object.
    """
    objects.all_gather(object_list, obj, group, weights_only, name)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
    weights_only: bool = False,
    *,
    name: str | None = None,
) -> None:
    """Gather one object of each member into ``object_gather_list`` on the rank ``dst``.

    All members call this function with the same destination. Objects may have any type and size; arrays inside objects as in
    :func:`broadcast_object_list`.

    Args:
        obj: this rank's object.
        object_gather_list: on the destination a list with an element for each member, by rank in the group, which are
            replaced (further elements are unchanged); on other members None or [].
        dst: global rank of the destination (default 0); or ``group_dst``, its rank in the group.
        group: the group; default the world.
        weights_only: as in :func:`broadcast_object_list`.
        name: as in :func:`mpicoll.broadcast`.

    Raises:
        TypeError, ValueError: not a list, too short, missing on the destination, or passed on another member.
        Others as :func:`broadcast_object_list`.

    Source: torch.distributed.gather_object.
    """
    objects.gather(obj, object_gather_list, dst, group, group_dst, weights_only, name)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
    weights_only: bool = False,
    *,
    name: str | None = None,
) -> None:
    """Send one object of ``scatter_object_input_list`` on the rank ``src`` to each member.

    All members call this function with the same source. Objects may have any type and size; the source gets a copy of its own
    object. Arrays inside objects as in :func:`broadcast_object_list`.

    Args:
        scatter_object_output_list: a list with at least one element; this rank's object replaces the first.
        scatter_object_input_list: on the source one object for each member, by rank in the group; ignored on other members
            (as in torch).
        src: global rank of the source (default 0); or ``group_src``, its rank in the group.
        group: the group; default the world.
        weights_only: as in :func:`broadcast_object_list`.
        name: as in :func:`mpicoll.broadcast`.

    Raises:
        TypeError, ValueError: not lists, no element for the output, or not one input for each member.
        Others as :func:`broadcast_object_list`.

    Source: torch.distributed.scatter_object_list.
    """
    objects.scatter(scatter_object_output_list, scatter_object_input_list, src, group, group_src, weights_only, name)
