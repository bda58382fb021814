"""The whole tensors that a rank owns of an optimizer's parameters, there for the time of a step.

Of its own parameters a rank has a tensor each, which keeps its shape and loses its memory between
steps. Plain parameters are their own whole tensors, on every rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardc.optim.exchange import Route, routes_of
from shardc.optim.owners import owners_of
from shardc.runtime.comm.collectives import all_reduce
from shardc.runtime.tensor.shard_operands import bump, cut
from shardc.runtime.tensor.shard_tensor import ShardTensor


class Owned:
    """Of one optimizer.

    Attributes:
        together: whether all parameters have the same owner.
        whole: by parameter, the tensor that is updated here.
        owners: the rank that owns each sharded parameter.
        routes: between parts and owners.
    """

    def __init__(self, together: bool) -> None:
        self.together = together
        self.whole: dict[Tensor, nn.Parameter] = {}
        self.owners: dict[Tensor, int] = {}
        self.routes: list[Route] = []

    def add(self, params: Sequence[Tensor], known: Sequence[Tensor]) -> None:
        """Give `params` owners, and this rank the whole tensors of its own.

        Args:
            known: all parameters of the optimizer, these included.
        """
        sharded = [p for p in params if isinstance(p, ShardTensor)]
        cut = [p for p in known if isinstance(p, ShardTensor)]
        if self.together and cut:
            _check_together(cut, known)
        for group in dict.fromkeys(p._spec.group for p in sharded):
            own = [p for p in sharded if p._spec.group == group]
            world = own[0]._spec.world_size
            shapes = [tuple(p.shape) for p in own]
            owners = [0] * len(own) if self.together else owners_of(shapes, world)
            self.owners.update(zip(own, owners, strict=True))
        for param in params:
            if not isinstance(param, ShardTensor):
                assert isinstance(param, nn.Parameter)
                self.whole[param] = param
            elif self.owners[param] == param._spec.rank:
                self.whole[param] = stand_in(param, param.device)
                self.whole[param].untyped_storage().resize_(0)
        self.routes = routes_of(cut, self.owners)

    @torch.no_grad()
    def collect(self, values: bool) -> None:
        """Bring gradients, and `values`, to their owners."""
        for route in self.routes:
            flags = torch.tensor(
                [p.grad is not None for p in route.params],
                dtype=torch.int32,
                device=route.params[0].device,
            )
            used = all_reduce(flags, "max", route.group).bool().tolist()
            rows = [(i, p._local) for i, p in enumerate(route.params)] if values else []
            rows += [(i, _local_gradient(p)) for i, p in enumerate(route.params) if used[i]]
            count = sum(used)
            wholes = route.to_owners(rows, f"the gradients of {count} parameters for their owners")
            owned = route.owned()
            for index in owned if values else ():
                self.whole[route.params[index]].data = wholes.pop(0)
            for index in owned:
                whole = self.whole[route.params[index]]
                whole.grad = wholes.pop(0) if used[index] else None

    @torch.no_grad()
    def distribute(self) -> None:
        """Bring the owners' values to the parts."""
        for route in self.routes:
            wholes = [self.whole[route.params[index]].detach() for index in route.owned()]
            what = f"the values of {len(route.params)} parameters from their owners"
            for param, part in zip(route.params, route.to_parts(wholes, what), strict=True):
                param._local.copy_(part)
            bump([param._local for param in route.params])

    def release(self) -> None:
        """Free whole values and gradients."""
        for param, whole in self.whole.items():
            if whole is not param:
                whole.grad = None
                whole.untyped_storage().resize_(0)

    def is_asked(self, mine: bool) -> bool:
        """Whether the owner, alone to say so, wants a gradient."""
        if not self.routes:
            return mine
        flag = torch.tensor([mine], dtype=torch.int32, device=self.routes[0].params[0].device)
        return bool(all_reduce(flag, "max", self.routes[0].group))

    def mean_over_ranks(self, loss: Any) -> Any:
        """The loss of all batches; a number, as a closure may give, stays what it is."""
        if not self.routes or not isinstance(loss, Tensor):
            return loss
        route = self.routes[0]
        return all_reduce(loss.detach(), "sum", route.group) / route.world_size


def check_cut(params: Sequence[Tensor]) -> None:
    """Raise for parameters that have no owner for a whole tensor."""
    for param in params:
        if isinstance(param, ShardTensor) and param._spec.tp is not None:
            raise ValueError(
                f"WholeTensorOptimizer: {param._label()} is also cut by tensor parallelism "
                f"({param._spec.tp.placements}), which has no owner for a whole tensor: give it "
                "to an optimizer that works elementwise"
            )


def _check_together(sharded: Sequence[ShardTensor], params: Sequence[Tensor]) -> None:
    """All must be able to have one owner."""
    why = "the optimizer looks at all parameters together, so that one rank must own them"
    if len({p._spec.group for p in sharded}) > 1:
        raise ValueError(f"{why}, but they are sharded over several meshes: make an optimizer each")
    if len(sharded) < len(params):
        plain = next(p for p in params if not isinstance(p, ShardTensor))
        raise ValueError(
            f"{why}, but one of shape {tuple(plain.shape)} is not sharded: shard it too, or give "
            "it to another optimizer"
        )


def stand_in(param: Tensor, device: torch.device | str) -> nn.Parameter:
    """A whole tensor in the place of `param`, without values."""
    empty = torch.empty(param.shape, dtype=param.dtype, device=device)
    return nn.Parameter(empty, param.requires_grad)


def _local_gradient(param: ShardTensor) -> Tensor:
    grad = param.grad
    if grad is None:  # another rank has one
        return torch.zeros_like(param._local)
    return grad._local if isinstance(grad, ShardTensor) else cut(grad, param)
