"""Any optimizer on sharded parameters: every parameter is updated as a whole, on one rank.

Each parameter has an owner. In a step the intervals of its value and of its reduced gradient travel
to the owner, the stock optimizer there updates the whole tensor, and the new value travels back to
the intervals. State exists on owners only, whole values and gradients there for the time of a step.
The update is the code of the unsharded run on the same tensors, so it is exact. Work and state are
1/W a rank; a step sends about what a gather and a reduction of the model send.

Where an optimizer looks at all parameters together (Prodigy, LBFGS, global norms), they all have
one owner: exact too, but one rank does all of the work. That is found out by trying it.

Left out: updates that overlap with messages, and parameters also cut by tensor parallelism.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.optim.first_state import parameters_of
from shardc.optim.given import Given, Params
from shardc.optim.independence import is_independent
from shardc.optim.owned import Owned, check_cut, stand_in
from shardc.optim.owner_state import OwnerState
from shardc.runtime import compat

OWN = ("params", "param_names")
"""What a group says of its parameters; the rest are settings."""

Closure = Callable[[], Any]


class WholeTensorOptimizer(Optimizer):
    """Any optimizer: `WholeTensorOptimizer(torch.optim.Muon, model.parameters(), lr=0.02)`.

    What it computes equals the unsharded run. Parameter groups, schedulers, `GradScaler`, clipping
    and `shardc.get_optimizer_state_dict` work as with other optimizers. Every rank must call
    `step`, `state_dict` and `load_state_dict`. Parameters that are not sharded are updated by every
    rank. On an unsharded model it is the plain optimizer.

    Args:
        make: the optimizer's class, or a function that is given parameters and settings.
        params: as the optimizer takes them: parameters, (name, parameter) pairs, groups, or the
            model where it takes one. Give them after `fully_shard`.
        together: whether one rank must have all parameters; None: tried out on small tensors.
        settings: the optimizer's own.

    Raises:
        ValueError: parameters also cut by tensor parallelism, or `together` for parameters of
            several meshes, or for sharded and plain ones.
    """

    def __init__(
        self,
        make: Callable[..., Optimizer],
        params: Params,
        *,
        together: bool | None = None,
        **settings: Any,
    ) -> None:
        self._ready = False
        self._make, self._settings = make, settings
        given = Given(params)
        check_cut(given.params)
        stand_ins = {p: stand_in(p, "meta") for p in given.params}
        template = make(given.replaced(stand_ins), **settings)
        users = {made: param for param, made in stand_ins.items()}
        groups = [
            {**group, "params": [users[p] for p in group["params"]]}
            for group in template.param_groups
        ]
        super().__init__(groups, template.defaults)
        self._asks_closure = _needs_closure(template)
        self.together = self._must_be_together(given) if together is None else together
        self.owned = Owned(self.together)
        self.owned.add(parameters_of(self), parameters_of(self))
        self.inner: Optimizer | None = None
        if self.owned.whole:
            self.inner = make(given.replaced(self.owned.whole), **settings)
        self._ready = True

    def _must_be_together(self, given: Given) -> bool:
        params = parameters_of(self)
        if self._asks_closure or len(params) < 2:
            return self._asks_closure
        group_of = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}

        def make(few: dict[int, nn.Parameter]) -> Optimizer:
            chosen = {params[index]: param for index, param in few.items()}
            return self._make(given.replaced(chosen), **self._settings)

        shapes = [tuple(p.shape) for p in params]
        return not is_independent(make, shapes, [group_of[p] for p in params])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of any optimizer. Every rank must call it."""
        super().add_param_group(param_group)
        if not self._ready:
            return
        group = self.param_groups[-1]
        check_cut(group["params"])
        self.owned.add(group["params"], parameters_of(self))
        own = [self.owned.whole[p] for p in group["params"] if p in self.owned.whole]
        settings = {key: value for key, value in group.items() if key not in OWN}
        if own and self.inner is None:
            self.inner = self._make([{**settings, "params": own}], **self._settings)
        elif own:
            assert self.inner is not None
            self.inner.add_param_group({**settings, "params": own})

    # -- a step ------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Closure) -> Any: ...
    def step(self, closure: Closure | None = None) -> Any:
        """Update all parameters that have a gradient on some rank. Every rank must call it.

        Args:
            closure: computes the loss and gradients; where the optimizer calls it several times
                (LBFGS), every rank does, and the loss is the mean over ranks.
        """
        if self._asks_closure:
            if closure is None:
                raise TypeError(f"{self._title()} needs a closure: step(closure)")
            return self._step_with(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            self.owned.collect(values=True)
            self._give_settings()
            if self.inner is not None:
                self.inner.step()
            self._take_settings()
            self.owned.distribute()
        finally:
            self.owned.release()
        return loss

    def _step_with(self, closure: Closure) -> Any:
        """The owner's optimizer runs; whenever it asks for a gradient, all ranks compute it."""
        first: list[Any] = []

        def evaluate() -> Any:
            self.owned.distribute()
            with torch.enable_grad():
                loss = closure()
            self.owned.collect(values=False)
            loss = self.owned.mean_over_ranks(loss)
            first.append(loss)
            return loss

        def asked() -> Any:
            self.owned.is_asked(True)
            return evaluate()

        try:
            self.owned.collect(values=True)
            self._give_settings()
            if self.inner is not None:
                self.inner.step(asked)
                self.owned.is_asked(False)
            else:
                while self.owned.is_asked(False):
                    evaluate()
            self._take_settings()
            self.owned.distribute()
        finally:
            self.owned.release()
        return first[0] if first else None

    # -- settings ----------------------------------------------------------------------------

    def _beside(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(number of a group, the group of the stock optimizer that has its parameters)."""
        users = {whole: param for param, whole in self.owned.whole.items()}
        number = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        for group in self.inner.param_groups if self.inner is not None else ():
            yield number[users[group["params"][0]]], group

    def _give_settings(self) -> None:
        for number, group in self._beside():
            new = self.param_groups[number]
            group.update({key: value for key, value in new.items() if key not in OWN})

    def _take_settings(self) -> None:
        for number, group in self._beside():
            new = {key: value for key, value in group.items() if key not in OWN}
            self.param_groups[number].update(new)

    # -- state -------------------------------------------------------------------------------

    def whole_state(self) -> dict[Tensor, Any]:
        """State by parameter, the same entries on every rank; tensors lie on owners.

        Every rank must call it. A tensor is a ShardTensor of which the owner holds all.
        """
        return self._shared().states(first=False)[0]

    def first_or_state(self) -> tuple[dict[Tensor, Any], dict[int, dict[str, Any]]]:
        """The same, before the first step what that makes: state, and settings of groups."""
        try:
            if not self._asks_closure:
                self.owned.collect(values=True)
            return self._shared().states(first=not self._asks_closure)
        finally:
            self.owned.release()

    def _shared(self) -> OwnerState:
        names = dict.fromkeys(route.group for route in self.owned.routes)
        settings = {
            number: {key: value for key, value in group.items() if key not in OWN}
            for number, group in self._beside()
        }
        return OwnerState(
            self.inner,
            self.owned.whole,
            self.owned.owners,
            parameters_of(self),
            settings,
            [compat.resolve_group(name) for name in names],
        )

    def state_dict(self) -> dict[str, Any]:
        """As of any optimizer; every rank must call it. See `whole_state` for the tensors."""
        return self._packed(self.whole_state(), {})

    def first_or_state_dict(self) -> dict[str, Any]:
        """The same, before the first step with what that makes."""
        return self._packed(*self.first_or_state())

    def _packed(
        self, states: Mapping[Tensor, Any], added: Mapping[int, dict[str, Any]]
    ) -> dict[str, Any]:
        for number, settings in self._shared().settings_of_all().items():
            self.param_groups[number].update(settings)
        index = {param: number for number, param in enumerate(parameters_of(self))}
        packed = super().state_dict()
        for number, settings in added.items():
            packed["param_groups"][number].update(settings)
        return {**packed, "state": {index[param]: tree for param, tree in states.items()}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gives, of any world size, or of the unsharded optimizer.

        Every rank must call it. Owners take their parameters' tensors.
        """
        super().load_state_dict({**state_dict, "state": {}})
        params = parameters_of(self)
        given = {params[index]: tree for index, tree in state_dict["state"].items()}
        local = self._shared().taken(given)
        if self.inner is None:
            return
        self._give_settings()
        own = self.inner.state_dict()
        number = {param: index for index, param in enumerate(parameters_of(self.inner))}
        state = {number[self.owned.whole[param]]: tree for param, tree in local.items()}
        self.inner.load_state_dict({**own, "state": state})

    def _title(self) -> str:
        return getattr(self._make, "__name__", type(self).__name__)


def _needs_closure(optimizer: Optimizer) -> bool:
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty
