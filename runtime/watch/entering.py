"""Entries of collectives: each joins its group's history, and a failure names it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.watch import lost_peers
from shardc.runtime.watch.history import Failed, Parted, history_of
from shardc.runtime.watch.long_waits import watch
from shardc.runtime.watch.progress import AwaitedCall, Label, progress

T = TypeVar("T")
BoxedGraph = Callable[[list[object]], object]
"""A compiled graph: it takes its inputs as one list and empties it."""


@contextmanager
def in_history(group: str) -> Iterator[None]:
    """Enter collectives started inside into the history of `group`; tell all ranks if they part."""
    outer, progress.history = progress.history, watch(group)
    try:
        yield
    except Parted as error:
        lost_peers.tell(group, error)
        raise
    finally:
        progress.inside = None
        progress.history = outer


@contextmanager
def naming(group: str) -> Iterator[None]:
    """Name the collective and the missing ranks where a collective over `group` fails."""
    with in_history(group):
        try:
            yield
        except RuntimeError as error:
            if history_of(group) is None or not lost_peers.is_from_backend(error):
                raise  # without peers there is nobody to name
            raise Failed(lost_peers.explain_failure(group, error)) from error


@contextmanager
def entering(what: str, group: str, value: Tensor | None = None) -> Iterator[None]:
    """Enter a collective for a call of the user, which waits for it inside.

    A traced `value` enters nothing. The first argument names the collective, in the same words on
    all ranks.
    """
    if value is not None and type(value) is not Tensor:
        yield
    else:
        with naming(group), AwaitedCall(what):
            yield


def told(value: T, what: str, group: dist.ProcessGroup) -> list[T]:
    """The values that all ranks of `group` give, in order; the second argument names it."""
    values = [value] * group.size()
    with entering(what, compat.group_name(group)):
        dist.all_gather_object(values, value, group=group)
    return values


class InGroup(AwaitedCall):
    """The label of a collective that a graph repeats, in the history of the group it ran in.

    Attributes:
        label: the label under which the collective ran.
        group: the name of the group.
    """

    __slots__ = ("_scopes", "group", "label")

    def __init__(self, label: Label, group: str, waits: bool) -> None:
        super().__init__(str(label), str(label))
        is_call = isinstance(label, AwaitedCall) and waits
        self.label = label.waiting() if is_call else label  # type: ignore[attr-defined]
        self.group = group
        self._scopes = list[ExitStack]()

    def __enter__(self) -> "InGroup":  # type: ignore[override]
        with ExitStack() as scope:
            scope.enter_context(naming(self.group))
            scope.enter_context(self.label)
            self._scopes.append(scope.pop_all())
        return self

    def __exit__(self, *error: object) -> None:
        self._scopes.pop().__exit__(*error)  # type: ignore[arg-type]


def naming_failures(
    call: BoxedGraph, groups: Sequence[str], replayed: Sequence[str] = ()
) -> BoxedGraph:
    """Wrap `call`, a boxed graph with collectives over `groups`, in `naming` and below autograd.

    A graph without collectives stays as it is.

    Python does not see the collectives that a CUDA graph replays, over the groups `replayed`: the
    graph is then one entry in each history. Such CUDA graphs are freed before NCCL destroys one of
    the groups.
    """
    if not groups:
        return call
    others = groups if replayed else groups[1:]
    if replayed:
        compat.free_cuda_graphs_before(replayed)

    def run(inputs: list[object]) -> object:
        for group in others:
            with naming(group):
                progress.enter_graph()
        with naming(groups[0]):
            if replayed:
                progress.history = None
            progress.begin_graph()
            try:
                with compat.below_autograd():
                    return call(inputs)
            finally:
                progress.end_graph()

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
