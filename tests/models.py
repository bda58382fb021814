"""Small models and the parity check that tests share."""

import copy
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, UntypedStorage, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from shardc import ShardedModule, ShardTensor, fully_shard, set_profile
from shardc.passes.estimate.hardware import Link, Profile
from shardc.runtime import compat
from shardc.runtime.comm import collectives, table_rows
from shardc.sharding import unit_plan


class Block(nn.Module):
    """Pre-norm MLP with a residual; odd sizes, so that nothing divides the world size."""

    def __init__(self, dim: int = 18, hidden: int = 37) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Embedding, blocks, head; with targets it returns the loss."""

    def __init__(self, blocks: int = 2, dim: int = 18, vocab: int = 31, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Checkpointed(Stack):
    """Computes every block again in the backward."""

    contexts: ClassVar[dict[str, Any]] = {}
    reentrant = False

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant, **self.contexts)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Choosing(Stack):
    """Runs its blocks in the order that it is told, which may differ from rank to rank."""

    order = (0, 1)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index in self.order:
            x = self.layers[index](x)
        return self.head(x).logsumexp(-1).mean() + 0 * targets.sum()


class GatedBlock(nn.Module):
    """A transformer block: attention and a gated MLP, with dropout."""

    def __init__(self, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.down, self.dropout = nn.Linear(4 * width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).movedim(-3, 0).transpose(2, 3)
        attended = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        x = x + self.dropout(self.out(attended))
        inner = self.norm2(x)
        hidden = F.silu(self.gate(inner)) * self.up(inner)
        return x + self.dropout(self.down(hidden))


class Gated(nn.Module):
    """Gated blocks; those whose numbers are in `checkpointed` are computed again."""

    checkpointed: tuple[int, ...] = ()

    def __init__(self, blocks: int = 4, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GatedBlock(width, dropout) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            again = index in self.checkpointed
            x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        return x.square().mean()


def tokens(seed: int, size: tuple[int, ...] = (2, 7), vocab: int = 31) -> Tensor:
    """Token ids, the same for the same seed on every rank."""
    return torch.randint(vocab, size, generator=torch.Generator().manual_seed(seed))


def batch_of(seed: int) -> dict[str, Tensor]:
    """The keyword arguments of a Stack, the same for the same seed on every rank."""
    return {"tokens": tokens(seed), "targets": tokens(seed + 1)}


def batch_of_rank(seed: int = 0) -> tuple[Tensor, Tensor]:
    """The arguments of a Stack, others on each rank."""
    seed += torch.distributed.get_rank()
    return tokens(seed), tokens(seed + 50)


def loss_of_rank(call: Callable[..., Any], seed: int = 1) -> Any:
    """The loss of this rank's batch."""
    return call(*batch_of_rank(seed))


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """`build()` under a fixed seed."""
    torch.manual_seed(seed)
    return build()


def on_meta(build: Callable[[], nn.Module] = Stack) -> nn.Module:
    """`build()` without values."""
    with torch.device("meta"):
        return build()


@contextmanager
def laid_out_for_gpus(least: int = 1) -> Iterator[None]:
    """Models are sharded as for GPUs inside, where units of `least` elements are large."""
    set_profile("h100-nvlink")
    try:
        with mock.patch.object(unit_plan, "_LARGE", least):
            yield
    finally:
        set_profile(None)


def is_unsharded(module: nn.Module) -> bool:
    """Whether nothing of it is sharded."""
    return not any(isinstance(p, ShardTensor) for p in module.parameters()) and not any(
        isinstance(m, ShardedModule) for m in module.modules()
    )


def shard_all(model: nn.Module, mesh: DeviceMesh, **kwargs: Any) -> nn.Module:
    """`fully_shard` on every repeated block and on the model."""
    return fully_shard(model, mesh=mesh, units="auto", **kwargs)


def compiled(model: nn.Module, executor: str = "eager", **kwargs: Any) -> Callable[..., Any]:
    """The model compiled by shardc."""
    return torch.compile(model, backend="shardc", options={"executor": executor}, **kwargs)


def full(tensor: Tensor) -> Tensor:
    """The whole value of a parameter or gradient, sharded or not."""
    return (tensor.full_tensor() if isinstance(tensor, ShardTensor) else tensor).detach()


class Message(NamedTuple):
    """A collective: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all", and its ranks."""

    kind: str
    ranks: int
    dtype: torch.dtype


QUICK = Profile(
    "quick", "made up", (("float32", 1e7),), 1e9, 1e9, 1, Link(1e-7, 1e9), Link(1e-7, 1e9),
    message=1e-7,
)  # fmt: skip
"""A slow device behind a quick wire: units are split into several buckets, which may be merged."""


class CompiledMode(TorchDispatchMode):
    """A mode under which compiled code runs as such: under others, Dynamo has it run op by op."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether compiled code runs, which the mode sees only the calls of."""
        return True


class Wire(CompiledMode):
    """What shardc sends while it is entered, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Message] = []

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
        if op.namespace == "_c10d_functional" and op._opname.startswith(kinds):
            kind = op._opname.removesuffix("_coalesced").split("_into")[0].removesuffix("_tensor")
            kind = kind.rstrip("_").removesuffix("_single")  # in place
            inputs = args[0] if isinstance(args[0], list) else [args[0]]
            group = next(given for given in reversed(args) if isinstance(given, str))
            ranks = compat.resolve_group(group).size()
            self.sent += [Message(kind, ranks, value.dtype) for value in inputs]
        if op._opname == "all_gather_in_steps":  # the second is sent by the wait
            self.sent += [Message("all_gather", ranks, args[1]) for ranks in (args[3], args[5])]
        if op._opname in ("fetch_rows", "return_rows"):  # they send several messages
            with self:
                return getattr(table_rows, op._opname)(*args)
        return op(*args, **(kwargs or {}))


class Live(CompiledMode):
    """Counts the bytes of the storages that operations make and that still exist.

    Args:
        limit: more than this counts only if it stays: a thread of gloo may hold the tensors of the
            last collective for a moment longer than this thread.

    Attributes:
        peak: the most bytes at a time.
    """

    def __init__(self, limit: float = float("inf")) -> None:
        super().__init__()
        self.limit, self.peak = limit, 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def _now(self) -> int:
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        return sum(size for _, size in self._made.values())

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if ShardTensor in types:
            return NotImplemented  # what it does inside is seen then
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = op(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        patience = time.monotonic() + 5
        while self._now() > self.limit and time.monotonic() < patience:
            time.sleep(0.001)
        self.peak = max(self.peak, self._now())
        return result


def measured_peak(run: Callable[[], Any], folder: Path) -> int:
    """The most bytes that `run` allocates at a time, by the profiler's account."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    path = str(folder / "trace.json")
    profile.export_chrome_trace(path)
    with open(path) as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("name") == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak


def _storages(values: Any) -> list[UntypedStorage]:
    plain = [value for value in tree_leaves(values) if type(value) is Tensor]
    return [value.untyped_storage() for value in plain if value.device.type != "meta"]


def mean_over_ranks(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The mean of a plain tensor over the ranks of `mesh`."""
    group = compat.group_name(mesh.get_group())
    return collectives.all_reduce(tensor.detach().contiguous(), "sum", group) / mesh.size()


def check_gradients(
    plain: nn.Module, sharded: nn.Module, mesh: DeviceMesh, **tolerances: float
) -> None:
    """Each gradient is the mean over ranks of the plain model's, and missing where that is."""
    assert any(p.grad is not None for p in plain.parameters()), "no gradient to compare"
    for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(
                full(q.grad), mean_over_ranks(p.grad, mesh),
                msg=lambda m, name=name: f"gradient of {name}: {m}", **tolerances,
            )  # fmt: skip


def check_parity(
    plain: nn.Module,
    sharded: nn.Module,
    step: Callable[..., Any],
    batch: Callable[[int], dict[str, Any]],
    mesh: DeviceMesh,
    steps: int = 2,
    loss_of: Callable[[Any], Tensor] = lambda out: out if isinstance(out, Tensor) else out.loss,
    tolerance: float = 1e-5,
    lr: float = 0.1,
) -> None:
    """Train both on each rank's batches; compare loss, every gradient, parameter and buffer.

    `step` is the sharded model, compiled or not; `batch(seed)` gives keyword arguments. The plain
    model's gradients are averaged over ranks. First asserts that the two sides differ: one holds
    ShardTensors, a part of the elements, the other plain tensors; and then, that there is something
    to compare: gradients that are not zero. A gradient may be off by `tolerance` times its own
    largest element, or a hundredth of the largest in the model: less is rounding.
    """
    assert not any(isinstance(p, ShardTensor) for p in plain.parameters())
    shards = [p for p in sharded.parameters() if isinstance(p, ShardTensor)]
    assert shards
    if mesh.size() > 1:
        held = sum(p.to_local().numel() for p in shards)
        assert held < sum(p.numel() for p in shards), "nothing is sharded"
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in sharded.named_parameters()] == names
    for number in range(steps):
        inputs = batch(100 * number + mesh.get_local_rank())
        want, got = loss_of(plain(**copy.deepcopy(inputs))), loss_of(step(**inputs))
        torch.testing.assert_close(got.detach(), want.detach(), rtol=tolerance, atol=tolerance)
        want.backward()
        got.backward()
        _average_and_compare(plain, sharded, mesh, tolerance)
        with torch.no_grad():
            for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
                if p.grad is not None:
                    p.sub_(lr * p.grad)
                    q.sub_(lr * q.grad)
                p.grad = q.grad = None
    for name, tensor in sharded.state_dict().items():
        torch.testing.assert_close(
            full(tensor), plain.state_dict()[name], rtol=tolerance, atol=tolerance,
            msg=lambda m, name=name: f"{name}: {m}",
        )  # fmt: skip


def _average_and_compare(
    plain: nn.Module, sharded: nn.Module, mesh: DeviceMesh, tolerance: float
) -> None:
    """Average the plain gradients over ranks, in place, and compare."""
    trained = [p for p in plain.parameters() if p.grad is not None]
    for p in trained:
        p.grad = mean_over_ranks(p.grad, mesh)
    largest = max((float(p.grad.abs().max()) for p in trained if p.numel()), default=0.0)
    assert largest > 0, "no gradient to compare"
    for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        if p.grad is None:
            assert q.grad is None, f"{name} has a gradient, unsharded it has none"
            continue
        assert isinstance(q.grad, ShardTensor), f"{name} has no sharded gradient"
        own = float(p.grad.abs().max()) if p.numel() else 0.0
        torch.testing.assert_close(
            full(q.grad), p.grad, rtol=tolerance, atol=tolerance * max(own, 1e-2 * largest),
            msg=lambda m, name=name: f"gradient of {name}: {m}",
        )  # fmt: skip
