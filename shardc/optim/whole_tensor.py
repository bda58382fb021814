"""Any optimizer on sharded parameters: one rank updates each parameter as a whole.

Each parameter has an owner. In a step the intervals of its value and of its reduced gradient travel
to the owner, the stock optimizer there updates the whole tensor, and the new value travels back to
the intervals. Only owners have state. They have whole values and gradients for the time of a step.
The update is the code of the unsharded run on the same tensors, so it is exact. Each rank has 1/W
of the work and state. A step sends about as many bytes as a gather and a reduction of the model.

Parameters are updated in a few stages, each by a stock optimizer of its own: messages of one stage
travel while another stage is updated (`owned`).

Where an optimizer looks at all parameters together (Prodigy, LBFGS, global norms), all parameters
have one owner, and one stage: the update is exact, too, but one rank does all of the work. A trial
on small tensors finds such optimizers.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.optim.first_state import parameters_of
from shardc.optim.given import OWN, GivenParams, Params
from shardc.optim.independence import is_independent
from shardc.optim.owned import Owned, Stage, stand_in
from shardc.optim.owner_state import OwnerState
from shardc.optim.state_sizes import state_sizes
from shardc.runtime import compat

Closure = Callable[[], Any]


class WholeTensorOptimizer(Optimizer):
    """Any optimizer: `WholeTensorOptimizer(torch.optim.Muon, model.parameters(), lr=0.02)`.

    Its updates equal the updates of the unsharded run. Parameter groups, schedulers, `GradScaler`,
    clipping and `shardc.get_optimizer_state_dict` work as with other optimizers. Every rank must
    call `step`, `state_dict` and `load_state_dict`. Every rank updates parameters that are not
    sharded. On an unsharded model it is the plain optimizer.

    Args:
        make: the optimizer's class, or a function that takes parameters and settings.
        params: parameters, (name, parameter) pairs, groups, or the model, as the optimizer takes
            them. Give them after `fully_shard`.
        together: whether one rank must have all parameters; None: a trial on small tensors tells.
        settings: the optimizer's own settings.

    Raises:
        ValueError: `together` for parameters of several meshes, or for sharded and plain ones.
    """

    calls_optimizers = True
    """`compile_step` leaves an update as one call."""

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
        given = GivenParams(params)
        stand_ins = {p: stand_in(p, "meta") for p in given.params}
        template = make(given.replaced(stand_ins), **settings)
        users = {made: param for param, made in stand_ins.items()}
        groups = [
            {**group, "params": [users[p] for p in group["params"]]}
            for group in template.param_groups
        ]
        super().__init__(groups, template.defaults)
        asked = inspect.signature(type(template).step).parameters.get("closure")
        self._asks_closure = asked is not None and asked.default is inspect.Parameter.empty
        self.together = self._must_be_together(given) if together is None else together
        self.owned = Owned(self.together)
        state = {param: param.nbytes for param in stand_ins}
        if not self.together:
            sizes = state_sizes(
                lambda: make(given.replaced(stand_ins), **settings), [*stand_ins.values()]
            )
            state = dict(zip(stand_ins, sizes, strict=True))
        for stage in self.owned.add(parameters_of(self), parameters_of(self), state):
            own = self._own(stage.params)
            if own:
                stage.inner = make(given.replaced(own), **settings)
        self._ready = True

    @property
    def inners(self) -> list[Optimizer]:
        """The stock optimizers that update this rank's own parameters, one a stage."""
        return [stage.inner for stage in self.owned.stages if stage.inner is not None]

    def _own(self, params: Iterable[Tensor]) -> dict[Tensor, nn.Parameter]:
        """The whole tensors that this rank has of `params`."""
        return {p: self.owned.whole[p] for p in params if p in self.owned.whole}

    def _must_be_together(self, given: GivenParams) -> bool:
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
        """Add a parameter group, as to any optimizer. Every rank must call it."""
        super().add_param_group(param_group)
        if not self._ready:
            return
        group = self.param_groups[-1]
        settings = {key: value for key, value in group.items() if key not in OWN}
        new = {param: param.nbytes for param in group["params"]}
        for stage in self.owned.add(group["params"], parameters_of(self), new):
            own = self._own(p for p in stage.params if p in new)
            given = {**settings, "params": list(own.values())}
            if own and stage.inner is not None:
                stage.inner.add_param_group(given)
            elif own:
                stage.inner = self._make([given], **self._settings)

    # -- a step ------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Closure) -> Any: ...
    def step(self, closure: Closure | None = None) -> Any:
        """Update all parameters that have a gradient on some rank. Every rank must call it.

        Args:
            closure: computes the loss and gradients. Where the optimizer calls it several times
                (LBFGS), every rank calls it as often, and the loss is the mean over ranks.
        """
        if self._asks_closure:
            if closure is None:
                name = getattr(self._make, "__name__", type(self).__name__)
                raise TypeError(f"{name} needs a closure: step(closure)")
            return self._step_with(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        graded: list[Optimizer] = []
        ungraded: list[Optimizer] = []

        def update(stage: Stage) -> None:
            if stage.inner is not None:
                stage.inner.step()
                has = any(param.grad is not None for param in parameters_of(stage.inner))
                (graded if has else ungraded).append(stage.inner)

        try:
            self._give_settings()
            self.owned.update(update)
            self._take_settings([*ungraded, *graded])  # settings of updates come last
        finally:
            self.owned.release()
        return loss

    def _step_with(self, closure: Closure) -> Any:
        """Run the owner's optimizer; whenever it asks for a gradient, all ranks compute one."""
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
            for inner in self.inners:  # one, on the owner
                inner.step(asked)
            if self.inners:
                self.owned.is_asked(False)
            else:
                while self.owned.is_asked(False):
                    evaluate()
            self._take_settings(self.inners)
            self.owned.distribute()
        finally:
            self.owned.release()
        return first[0] if first else None

    # -- settings ----------------------------------------------------------------------------

    def _numbers(self, inner: Optimizer) -> list[int]:
        """The number of this optimizer's group for each group of a stock optimizer."""
        users = {whole: param for param, whole in self.owned.whole.items()}
        number = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        return [number[users[group["params"][0]]] for group in inner.param_groups]

    def _beside(self, inners: Iterable[Optimizer]) -> Iterator[tuple[dict[str, Any], ...]]:
        """Pairs of a group of this optimizer and a stock optimizer's group with its parameters."""
        for inner in inners:
            for number, group in zip(self._numbers(inner), inner.param_groups, strict=True):
                yield self.param_groups[number], group

    def _give_settings(self) -> None:
        """Give each stock optimizer copies of the settings, as some write to settings in place."""
        for mine, group in self._beside(self.inners):
            group.update({k: _copied(value) for k, value in mine.items() if k not in OWN})

    def _take_settings(self, inners: Iterable[Optimizer]) -> None:
        """Take settings from stock optimizers; an unchanged tensor stays the user's object."""
        for mine, group in self._beside(inners):
            for key, value in group.items():
                if key not in OWN and not _is_same(mine.get(key), value):
                    mine[key] = value

    # -- state -------------------------------------------------------------------------------

    def whole_state(self) -> dict[Tensor, Any]:
        """The state by parameter, with the same entries on every rank; tensors lie on owners.

        Every rank must call it. A tensor is a ShardTensor that the owner holds as a whole.
        """
        return self._shared().states(first=False)[0]

    def first_or_state(self) -> tuple[dict[Tensor, Any], dict[int, dict[str, Any]]]:
        """The state; before the first step, the state and the group settings that it makes."""
        try:
            if not self._asks_closure:
                self.owned.collect(values=True)
            return self._shared().states(first=not self._asks_closure)
        finally:
            self.owned.release()

    def _shared(self) -> OwnerState:
        names = dict.fromkeys(route.group for route in self.owned.routes)
        return OwnerState(
            [(inner, self._numbers(inner)) for inner in self.inners],
            self.owned.whole,
            self.owned.owners,
            parameters_of(self),
            [compat.resolve_group(name) for name in names],
        )

    def state_dict(self) -> dict[str, Any]:
        """The state dict, as of any optimizer. Every rank must call it.

        The tensors are those of `whole_state`.
        """
        return self._packed(self.whole_state(), {})

    def first_or_state_dict(self) -> dict[str, Any]:
        """The state dict; before the first step, the state dict that a first step makes."""
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
        """Load a dict of `state_dict`, from any world size, or from the unsharded optimizer.

        Every rank must call it. Owners take their parameters' tensors.
        """
        super().load_state_dict({**state_dict, "state": {}})
        params = parameters_of(self)
        given = {params[index]: tree for index, tree in state_dict["state"].items()}
        local = self._shared().taken(given)
        self._give_settings()
        for inner in self.inners:
            number = {param: index for index, param in enumerate(parameters_of(inner))}
            own = {number[w]: local[p] for p, w in self._own(local).items() if w in number}
            inner.load_state_dict({**inner.state_dict(), "state": own})


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if isinstance(value, (dict, list, set)) else value


def _is_same(old: Any, new: Any) -> bool:
    return isinstance(old, Tensor) and isinstance(new, Tensor) and torch.equal(old, new)
