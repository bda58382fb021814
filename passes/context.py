"""What passes share: the context they are given and the predicates they ask of nodes."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from shardc.passes.profiles import Profile
from shardc.runtime import comm_buffers  # noqa: F401 (registers its ops)
from shardc.runtime.progress import in_short
from shardc.runtime.spec import UnshardSpec, spec_of

c10d = torch.ops._c10d_functional

GATHERS = {
    c10d.all_gather_into_tensor.default,
    c10d.all_gather_into_tensor_out.default,
    c10d.all_gather_into_tensor_coalesced.default,
    torch.ops.shardc.all_gather.default,
}
_OWN = {torch.ops.shardc.all_gather.default, torch.ops.shardc.reduce_scatter.default}
"""Collectives of ours (`comm_buffers`)."""


@dataclass(frozen=True)
class ScheduleOptions:
    """What the schedule is planned with; equal on all ranks.

    Attributes:
        profile: the device and its links.
        prefetch: how many units ahead gathers start; None leaves it to the cost model.
        backward_prefetch: the same for the backward, in FSDP1's words: "pre", "post" or "none".
        forward_hints, backward_hints: units to gather when another's forward or backward begins.
        reduce_buffers: how many reductions may be under way; None bounds their bytes only.
        coalesce: whether collectives may be merged.
        fused: whether the executor fuses elementwise ops (Inductor).
    """

    profile: Profile
    prefetch: int | None = None
    backward_prefetch: str | None = None
    forward_hints: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    backward_hints: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    reduce_buffers: int | None = None
    coalesce: bool = True
    fused: bool = True

    def wanted(self, phase: str, gathers: Sequence[tuple[int, int]]) -> list[int | None]:
        """The event at which each gather, given as (unit, event), is asked for, if it is."""
        first: dict[int, int] = {}
        for unit, event in gathers:
            first.setdefault(unit, event)
        order = list(first)
        hints = self.backward_hints if phase == "backward" else self.forward_hints
        by_target = {t: unit for unit, targets in hints.items() for t in targets if unit in first}
        distance = self.prefetch
        if phase == "backward" and self.backward_prefetch is not None:
            distance = 1 if self.backward_prefetch == "pre" else 0
        result: list[int | None] = []
        for unit, event in gathers:
            if unit in by_target:
                result.append(min(event, first[by_target[unit]]))
            elif distance is None:
                result.append(None)
            elif phase == "backward" and self.backward_prefetch == "none":
                result.append(event)
            else:
                result.append(first[order[max(0, order.index(unit) - distance)]])
        return result


@dataclass(frozen=True)
class Budget:
    """A bound on memory, in bytes.

    Attributes:
        nbytes: of everything.
        static: of segments and optimizer state; gradients count where the backward makes them.
        fused: whether the executor keeps fused values in registers (Inductor).
        clones: whether the backend clones what it reduces (gloo).
    """

    nbytes: int
    static: int
    fused: bool
    clones: bool


UNITS_IN_FLIGHT = 2
"""FSDP's `limit_all_gathers`: as many units may be under way or waiting to be read."""


@dataclass(frozen=True)
class Taken:
    """A full parameter that a graph is given: `slot` of the bucket at input `position`."""

    position: int
    slot: int


@dataclass
class PassContext:
    """What a pass may know beside the graph.

    Attributes:
        phase: "dynamo", "joint", "forward" or "backward".
        used: per placeholder name of a segment, the slots its graph reads (`insert_unshard`).
        leaves: per placeholder name of a segment, the input that gets its gradient if it is another
            (`insert_unshard`).
        outside: inputs of the Dynamo graph that are segments of buckets which the eager runtime
            gathers.
        taken: the full parameters that come in as inputs, behind all others (`take_gathered`).
        differentiated: per input of a joint graph, the slots that get a gradient
            (`find_used_slots`).
        results: how many outputs of the forward are the caller's; behind them is what it saves.
            None where no backward follows (`find_used_slots`).
        options: what the schedule is planned with; None leaves the graph in its order.
        units: per input of the Dynamo graph that is a segment, the number of its unit.
        labels: per such input, the name of its bucket.
        cut: per name of a `recut` node, the position of its segment among the inputs. The backward
            graph has the node's result as an input of the same name.
        agree_on_seconds: given the collectives of a graph and the compute seconds between their
            events, the seconds that all ranks plan with.
        agree_on_count: given facts and a count, the smallest count of any rank.
        budget: what memory the plan may use; None for no bound.
        open_positions: inputs that are segments of units whose reshard is left to the compiler.
        kept: those of them that stay gathered until the backward (`choose_kept`).
        units_in_flight: how many units may be under way or waiting to be read (`choose_kept`).
        number: the number of the graph in this process (`run_passes`).
    """

    phase: str
    used: dict[str, frozenset[int]] = field(default_factory=dict)
    leaves: dict[str, str] = field(default_factory=dict)
    outside: frozenset[int] = frozenset()
    taken: list["Taken"] = field(default_factory=list)
    differentiated: list[frozenset[int]] = field(default_factory=list)
    results: int | None = None
    options: ScheduleOptions | None = None
    units: dict[int, int] = field(default_factory=dict)
    labels: dict[int, str] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    agree_on_seconds: Callable[[list[str], list[float]], list[float]] | None = None
    agree_on_count: Callable[[list[str], int], int] | None = None
    budget: Budget | None = None
    open_positions: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()
    units_in_flight: int = UNITS_IN_FLIGHT
    number: int = -1

    @property
    def stem(self) -> str:
        """What the names of dumps of the graph begin with."""
        return f"{self.number:03d}_{self.phase}"

    def unit_of(self, transfer: Node) -> int:
        """The number of the unit whose bucket a collective moves; -1 where it is not known."""
        position = next(iter(self.positions_of(transfer)), None)
        return -1 if position is None else self.units[position]

    def labels_of(self, transfer: Node) -> tuple[str, ...]:
        """The names of the buckets that a collective moves, in its order."""
        return tuple(self.labels.get(position, "?") for position in self.positions_of(transfer))

    def positions_of(self, transfer: Node) -> list[int]:
        """The inputs of the Dynamo graph that are segments of the buckets a collective moves."""
        if not is_all_gather(transfer):
            found = [position_of(result, self.units) for result in results_of(transfer)]
        else:
            given = transfer.args[0]
            parts = given if isinstance(given, (list, tuple)) else [given]
            found = [self.position_behind(part) for part in parts if isinstance(part, Node)]
        return [position for position in found if position is not None]

    def position_behind(self, part: Node) -> int | None:
        """Which input is the segment that `part` comes from."""
        sources = {source.name for source in reach(part, lambda n: n.all_input_nodes)}
        cut = next((self.cut[name] for name in sources if name in self.cut), None)
        return cut if cut is not None else _segment_among(sources, self.units)

    def reshards(self, node: Node) -> bool:
        """Whether the bucket that `node` gathers is freed after the forward."""
        position = position_of(node, self.units)
        if self.budget is not None and position in self.open_positions:
            return position not in self.kept
        return any(spec.reshard_after_forward for spec in specs_of(node))

    def for_trial(self, phase: str, units_in_flight: int) -> "PassContext":
        """The context of a graph that is only tried: ranks do not agree on it."""
        return replace(
            self,
            phase=phase,
            units_in_flight=units_in_flight,
            cut={},
            agree_on_seconds=None,
            agree_on_count=None,
        )


def position_of(node: Node, positions: Iterable[int]) -> int | None:
    """Which input of the Dynamo graph is the segment that a collective gathers or reduces to.

    `node` may also be the wait for one of several buckets that are gathered together.
    """
    if is_wait(node):
        result = node.args[0]
        assert isinstance(result, Node)
        node = result
        if result.target is operator.getitem:
            together, index = result.args
            node = together.args[0][index]  # type: ignore[union-attr, index, assignment]
    elif not is_all_gather(node):  # a gradient: at the place of its segment among the results
        results = node.graph.output_node().args[0]
        made = reach(node, lambda n: n.users)
        assert isinstance(results, (list, tuple))
        return next((i for i in positions if i < len(results) and results[i] in made), None)
    return _segment_among(
        {source.name for source in reach(node, lambda n: n.all_input_nodes)}, positions
    )


def _segment_among(names: set[str], positions: Iterable[int]) -> int | None:
    """Which of `positions` is among the inputs of these names."""
    return next((i for i in positions if names & {f"primals_{i + 1}", f"arg{i}_1"}), None)


def results_of(node: Node) -> list[Node]:
    """What a collective gives: itself, or for a coalesced one the items of its list."""
    items = [user for user in node.users if user.target is operator.getitem]
    return items or [node]


def waits_for(node: Node) -> list[Node]:
    """The waits for a collective: one for each bucket that it moves."""
    return [user for result in results_of(node) for user in result.users if is_wait(user)]


def reach(start: Node, neighbours: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """All nodes that can be reached from `start`, itself included."""
    found, todo = {start}, [start]
    while todo:
        for node in neighbours(todo.pop()):
            if node not in found:
                found.add(node)
                todo.append(node)
    return found


def signatures_of(node: Node) -> list[str]:
    """The signatures of the buckets that a collective moves: several if it is coalesced."""
    custom: dict[str, Any] = node.meta.get("custom") or {}
    signature = custom.get("shardc")
    return signature.split("+") if signature else []


def specs_of(node: Node) -> list[UnshardSpec]:
    """The specs of the buckets that a collective moves; none if it is not one of ours."""
    return [spec_of(signature) for signature in signatures_of(node)]


def spec_of_node(node: Node) -> UnshardSpec | None:
    """The spec of the first of them: its group and world size are those of all."""
    return next(iter(specs_of(node)), None)


def ranks_in(node: Node) -> int:
    """Among how many ranks a collective goes."""
    given = [argument for argument in node.args if isinstance(argument, int)]
    spec = spec_of_node(node)
    return given[0] if given else spec.reduction.copies if spec is not None else 1


def is_all_gather(node: Node) -> bool:
    """Whether the node starts an all-gather."""
    return node.op == "call_function" and node.target in GATHERS


def is_collective(node: Node) -> bool:
    """Whether the node starts a collective."""
    if node.op != "call_function" or is_wait(node):
        return False
    is_functional = getattr(node.target, "namespace", None) == "_c10d_functional"
    return is_functional or node.target in _OWN


def is_wait(node: Node) -> bool:
    """Whether the node waits for a collective."""
    return node.op == "call_function" and node.target is c10d.wait_tensor.default


def kind_of(node: Node) -> str:
    """A collective or wait in a word: all_gather, reduce_scatter, all_reduce or wait."""
    name = str(getattr(node.target, "_opname", node.target))
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "wait")
    return next((kind for kind in kinds if name.startswith(kind)), name)


def is_random(node: Node) -> bool:
    """Whether the node draws random numbers, so that to compute it again gives another value."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_view(node: Node) -> bool:
    """Whether the node only looks at its input in another way, at no cost."""
    target = node.target
    return getattr(target, "is_view", False) or target in (operator.getitem, *_ALIASES)


WRITES = "shardc_writes"
"""Where the meta of a node that returns nothing has the values that it writes into a buffer."""

_ALIASES = (torch.ops.aten._unsafe_view.default,)


def describe(node: Node, labels: Sequence[str] = ()) -> str:
    """What a collective of ours moves, in one line; `labels` are the names of its buckets."""
    name = getattr(node.target, "_opname", str(node.target))
    unit = f"{in_short(labels)}: " if labels else ""
    return f"{unit}{name} of {' and '.join(map(describe_spec, specs_of(node)))}"


def describe_spec(spec: UnshardSpec) -> str:
    """A bucket in one line, for the error that names what differs between ranks."""
    shapes = " ".join("x".join(map(str, shape)) or "scalar" for shape in spec.shapes)
    dtypes = dict.fromkeys([spec.dtype, spec.compute_dtype, spec.reduction.dtype or spec.dtype])
    names = "/".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{spec.numel} {names} over {spec.world_size} ranks ({shapes})"


def graph_modules(gm: GraphModule) -> Iterator[GraphModule]:
    """`gm` and the bodies of its higher-order ops (activation checkpointing), outermost first."""
    return (module for module in gm.modules() if isinstance(module, GraphModule))


def body_operands(call: Node, body: Graph) -> Iterator[tuple[Node, Node]]:
    """Pairs (placeholder of the body, operand of the call); operands come last in the call."""
    operands = [leaf for leaf in tree_leaves(call.args) if isinstance(leaf, Node)]
    placeholders = [node for node in body.nodes if node.op == "placeholder"]
    return zip(reversed(placeholders), reversed(operands), strict=False)
