"""The whole tensors of the parameters that a rank owns, in memory while they are updated.

A rank has a tensor for each parameter that it owns. Between steps the tensor keeps its shape and
loses its memory. A plain parameter is its own whole tensor, on every rank.

Parameters are updated in stages. While owners update one stage, the gradients and values of the
next stage travel to their owners, and the values of the stage before travel back:

    wire     to 0 | to 1    | to 2, back 0 | to 3, back 1 | ... | back n
    owners        | stage 0 | stage 1      | stage 2      | ... |

Where all parameters have one owner there is one stage.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.optim.exchange import Route, routes_of
from shardc.optim.owners import owners_of
from shardc.runtime.checks.words import plural
from shardc.runtime.comm.collectives import all_reduce
from shardc.runtime.tensor.shard_operands import bump, interval_like
from shardc.runtime.tensor.shard_tensor import ShardTensor

Receive = Callable[[], None]
"""Waits for messages that were started and takes their values."""


@dataclass(eq=False)
class Stage:
    """Parameters that travel at once and are updated at once, equal on all ranks.

    Attributes:
        params: all parameters of the stage.
        routes: the routes between parts and owners; none for plain parameters.
        inner: the stock optimizer of the parameters that this rank updates; None if there are none.
    """

    params: tuple[Tensor, ...]
    routes: tuple[Route, ...] = ()
    inner: Optimizer | None = None


class Owned:
    """The parameters of one optimizer, dealt to owners.

    Attributes:
        together: whether all parameters have the same owner.
        whole: the tensors that this rank updates, by parameter.
        owners: the rank that owns each sharded parameter.
        stages: the stages, in the order of their updates.
    """

    def __init__(self, together: bool) -> None:
        self.together = together
        self.whole: dict[Tensor, nn.Parameter] = {}
        self.owners: dict[Tensor, int] = {}
        self.stages: list[Stage] = []

    @property
    def routes(self) -> list[Route]:
        """The routes of all stages."""
        return [route for stage in self.stages for route in stage.routes]

    def add(
        self, params: Sequence[Tensor], known: Sequence[Tensor], state: Mapping[Tensor, int]
    ) -> list[Stage]:
        """Give `params` owners, and this rank the whole tensors of the parameters that it owns.

        Args:
            known: all parameters of the optimizer, `params` included.
            state: the bytes of the state of each of `params`.

        Returns:
            The stages that have `params`.
        """
        if self.together:
            _check_together(known)
        sharded = [p for p in params if isinstance(p, ShardTensor)]
        for group in dict.fromkeys(p._shard_spec.group for p in sharded):
            own = [p for p in sharded if p._shard_spec.group == group]
            world = own[0]._shard_spec.world_size
            shapes = [tuple(p.shape) for p in own]
            sizes = [state[p] for p in own]
            owners = [0] * len(own) if self.together else owners_of(shapes, world, sizes)
            self.owners.update(zip(own, owners, strict=True))
        for param in params:
            if not isinstance(param, ShardTensor):
                assert isinstance(param, nn.Parameter)
                self.whole[param] = param
            elif self.owners[param] == param._shard_spec.rank:
                self.whole[param] = stand_in(param, param.device)
                self.whole[param].untyped_storage().resize_(0)
        new = self._stages_of(known if self.together else params)
        if self.together and self.stages:
            new[0].inner = self.stages.pop().inner
        self.stages += new
        return new

    def _stages_of(self, params: Sequence[Tensor]) -> list[Stage]:
        routes = routes_of([p for p in params if isinstance(p, ShardTensor)], self.owners)
        if self.together:
            return [Stage(tuple(params), tuple(routes))]
        plain = tuple(p for p in params if not isinstance(p, ShardTensor))
        parts = [part for route in routes for part in route.in_stages()]
        return [*([Stage(plain)] if plain else []), *(Stage(p.params, (p,)) for p in parts)]

    # -- a step ------------------------------------------------------------------------------

    def update(self, each: Callable[[Stage], None]) -> None:
        """Call `each` for every stage while its whole tensors are here; bring their values back."""
        used = self._used()
        coming = self._to_owners(self.stages[0], used)
        leaving: Receive = _nothing
        for stage, following in zip_longest(self.stages, self.stages[1:]):
            arrive, coming = coming, self._to_owners(following, used) if following else _nothing
            arrive()
            each(stage)
            settle, leaving = leaving, self._to_parts(stage)
            settle()
        leaving()

    def collect(self, values: bool) -> None:
        """Bring the gradients of all stages to their owners; with `values`, the values, too."""
        used = self._used()
        for arrive in [self._to_owners(stage, used, values) for stage in self.stages]:
            arrive()

    def distribute(self) -> None:
        """Bring the owners' values of all stages to the parts; owners keep their whole tensors."""
        for settle in [self._to_parts(stage, keeps=True) for stage in self.stages]:
            settle()

    def release(self) -> None:
        """Free whole values and gradients."""
        for param in self.whole:
            self._release(param)

    def _release(self, param: Tensor) -> None:
        whole = self.whole.get(param, param)
        if whole is not param:
            whole.grad = None
            whole.untyped_storage().resize_(0)

    # -- messages ----------------------------------------------------------------------------

    @torch.no_grad()
    def _used(self) -> set[Tensor]:
        """The sharded parameters with a gradient on some rank; sends one message for each group."""
        groups: dict[str, list[ShardTensor]] = {}
        for route in self.routes:
            groups.setdefault(route.group, []).extend(route.params)
        used: set[Tensor] = set()
        for group, params in groups.items():
            has = [param.grad is not None for param in params]
            flags = torch.tensor(has, dtype=torch.int32, device=params[0].device)
            for name in dict.fromkeys([group, *(g for p in params for g in _tp_groups(p))]):
                flags = all_reduce(flags, "max", name)
            used |= {p for p, flag in zip(params, flags.tolist(), strict=True) if flag}
        return used

    @torch.no_grad()
    def _to_owners(self, stage: Stage, used: set[Tensor], values: bool = True) -> Receive:
        """Start to bring a stage's gradients to their owners; with `values`, the values, too."""
        started = []
        for route in stage.routes:
            graded = {i for i, p in enumerate(route.params) if p in used}
            rows = [(i, p._local) for i, p in enumerate(route.params)] if values else []
            rows += [(i, _local_gradient(route.params[i])) for i in sorted(graded)]
            what = f"the gradients of {plural(len(graded), 'parameter')} for their owners"
            started.append((route, graded, route.to_owners(rows, what)))

        @torch.no_grad()
        def arrive() -> None:
            for route, graded, finish in started:
                wholes = iter(finish())
                owned = route.owned()
                for index in owned if values else ():
                    self.whole[route.params[index]].data = next(wholes)
                for index in owned:
                    whole = self.whole[route.params[index]]
                    whole.grad = next(wholes) if index in graded else None

        return arrive

    @torch.no_grad()
    def _to_parts(self, stage: Stage, keeps: bool = False) -> Receive:
        """Start to bring the owners' values to the parts; `keeps` leaves them on owners, too."""
        started = []
        for route in stage.routes:
            wholes = [self.whole[route.params[index]].detach() for index in route.owned()]
            what = f"the values of {plural(len(route.params), 'parameter')} from their owners"
            started.append((route, route.to_parts(wholes, what)))
        for param in () if keeps else stage.params:
            self._release(param)

        @torch.no_grad()
        def settle() -> None:
            for route, finish in started:
                for param, part in zip(route.params, finish(), strict=True):
                    param._local.copy_(part)
                bump([param._local for param in route.params])

        return settle

    # -- closures ----------------------------------------------------------------------------

    def is_asked(self, mine: bool) -> bool:
        """Whether the owner wants a gradient; only the owner may give True for `mine`."""
        if not self.routes:
            return mine
        flag = torch.tensor([mine], dtype=torch.int32, device=self.routes[0].params[0].device)
        return bool(all_reduce(flag, "max", self.routes[0].group))

    def mean_over_ranks(self, loss: Any) -> Any:
        """The mean of the ranks' losses; a loss that is no tensor stays unchanged."""
        if not self.routes or not isinstance(loss, Tensor):
            return loss
        route = self.routes[0]
        return all_reduce(loss.detach(), "sum", route.group) / route.world_size


def _nothing() -> None:
    pass


def _tp_groups(param: ShardTensor) -> tuple[str, ...]:
    return () if param._shard_spec.tp is None else param._shard_spec.tp.groups


def _check_together(params: Sequence[Tensor]) -> None:
    """Raise ValueError unless all parameters can have one owner."""
    sharded = [p for p in params if isinstance(p, ShardTensor)]
    why = "the optimizer looks at all parameters together, so that one rank must own them"
    if len({p._shard_spec.group for p in sharded}) > 1:
        raise ValueError(f"{why}, but they are sharded over several meshes: make an optimizer each")
    if sharded and len(sharded) < len(params):
        plain = next(p for p in params if not isinstance(p, ShardTensor))
        raise ValueError(
            f"{why}, but one of shape {tuple(plain.shape)} is not sharded: shard it too, or give "
            "it to another optimizer"
        )


def stand_in(param: Tensor, device: torch.device | str) -> nn.Parameter:
    """A parameter without values, of the full shape of `param`, to stand in for it."""
    empty = torch.empty(param.shape, dtype=param.dtype, device=device)
    return nn.Parameter(empty, param.requires_grad)


def _local_gradient(param: ShardTensor) -> Tensor:
    grad = param.grad
    if grad is None:  # another rank has one
        return torch.zeros_like(param._local)
    return grad._local if isinstance(grad, ShardTensor) else interval_like(grad, param)
