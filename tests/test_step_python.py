"""The Python of a step: a graph follows what it reads, and a step that does more is refused.

Each case trains the same model separately and by `compile_step`, and compares all that is left.
"""

import copy
import dataclasses
import functools
import random
import types

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import seeded
from ranks import on_ranks
from torch import nn

from shardc import compile_step, fully_shard
from shardc.step.constants import Same

CALLS = 8
factor = 1.0


def _batch(number):
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)


class Trainer:
    """A loop as users write it; the methods after `step` are called before each call of it."""

    def __init__(self, make=torch.optim.AdamW):
        self.model = fully_shard(seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))))
        self.optimizer = make(self.model.parameters(), lr=1e-2)
        self.loss, self.alpha, self.runs = F.mse_loss, 1.0, []

    def step(self, x, y):
        self.runs.append(1)
        return self.update(self.loss(self.model(x), y))

    def update(self, loss):
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def before(self, number):
        """Change something from outside before a call."""

    def arguments(self, number):
        return _batch(number)

    def values(self, result):
        """The numbers that a call leaves, beside parameters and state."""
        return result.item()


class LoadsState(Trainer):
    """The state of the optimizer is rolled back: `load_state_dict` replaces its dictionaries."""

    def before(self, number):
        if number == 3:
            self.kept = copy.deepcopy(self.optimizer.state_dict())
        if number == 5:
            self.optimizer.load_state_dict(self.kept)


class LoadsFusedState(LoadsState):
    def __init__(self):
        super().__init__(lambda params, lr: torch.optim.AdamW(params, lr, fused=True))


class Rewriting(torch.optim.Optimizer):
    """Its step writes its rate anew, with the value that is there."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["lr"] = group["lr"] * 1.0
            for param in group["params"]:
                param.add_(param.grad, alpha=-group["lr"])


class RewritesRate(Trainer):
    def __init__(self):
        super().__init__(Rewriting)


def _at_4(name, change):
    """A trainer that is changed before call 4; ranks find the class by its name."""

    def before(self, number):
        if number == 4:
            change(self)

    return type(name, (Trainer,), {"before": before})


ClearsState = _at_4("ClearsState", lambda self: self.optimizer.state.clear())
NewModel = _at_4("NewModel", lambda self: self.__init__())
NewLoss = _at_4("NewLoss", lambda self: setattr(self, "loss", F.l1_loss))
OtherAlpha = _at_4("OtherAlpha", lambda self: setattr(self, "alpha", 2.0))
NewOptimizer = _at_4(
    "NewOptimizer",
    lambda self: setattr(self, "optimizer", torch.optim.SGD(self.model.parameters(), lr=0.1)),
)
NewHook = _at_4(
    "NewHook", lambda self: self.model[0].register_forward_hook(lambda m, args, out: out * 2)
)
NewHookOnParameter = _at_4(
    "NewHookOnParameter", lambda self: self.model[0].weight.register_hook(lambda grad: grad * 2)
)


class NewActivation(Trainer):
    def __init__(self):
        super().__init__()
        self.model.append(nn.GELU())

    def before(self, number):
        if number == 4:
            self.model[2] = nn.ReLU()


class OtherDropout(Trainer):
    def __init__(self):
        super().__init__()
        self.model.append(nn.Dropout(0.5))

    def before(self, number):
        if number == 4:
            self.model[2].p = 0.25


class TeacherInEval(Trainer):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).requires_grad_(False)

    def step(self, x, y):
        self.runs.append(1)
        return self.update(self.loss(self.model(x), self.teacher(y)))

    def before(self, number):
        if number == 4:
            self.teacher.eval()


class ReadsFurtherDown(Trainer):
    """The step reads a setting of a setting, in a method and in a function inside of one."""

    def __init__(self):
        super().__init__()
        self.settings = types.SimpleNamespace(weight=1.0, more={"scale": 1.0})

    def step(self, x, y):
        self.runs.append(1)
        return self.update(self.weighted(x, y))

    def weighted(self, x, y):
        def by_factor(loss):
            return loss * factor * self.settings.more["scale"]

        return by_factor(self.loss(self.model(x), y)) * self.settings.weight

    def before(self, number):
        global factor
        factor = 2.0 if number > 5 else 1.0
        if number == 2:
            self.settings.weight = 2.0
        if number == 4:
            self.settings.more["scale"] = 3.0


class OfSlots:
    __slots__ = ("weight",)


class ReadsOfClasses(Trainer):
    """The step reads an attribute of the class, one in a slot, and a number in a list."""

    weight = 1.0

    def __init__(self):
        super().__init__()
        self.slots, self.weights = OfSlots(), [1.0]
        self.slots.weight = 1.0

    def step(self, x, y):
        loss = self.loss(self.model(x), y) * self.weight * self.slots.weight
        self.runs.append(1)
        return self.update(loss * self.weights[0])

    def before(self, number):
        ReadsOfClasses.weight = 2.0 if number > 1 else 1.0
        if number == 4:
            self.slots.weight = 2.0
        if number == 6:
            self.weights[0] = 2.0


class Helper:
    def __init__(self):
        self.factor = 1.0

    def scaled(self, loss):
        return loss * self.factor


helper = Helper()


class ReadsByOtherWays(Trainer):
    """The step reads a number of NumPy, a property, by `getattr`, and in a method of an object."""

    def __init__(self):
        super().__init__()
        self.scale, self.beta, helper.factor = numpy.float64(1.0), 1.0, 1.0

    @property
    def weight(self):
        return 2 * self.alpha

    def step(self, x, y):
        self.runs.append(1)
        loss = self.loss(self.model(x), y) * self.scale * self.weight * getattr(self, "beta")  # noqa: B009
        return self.update(helper.scaled(loss))

    def before(self, number):
        if number == 2:
            self.scale = numpy.float64(2.0)
        if number == 4:
            self.alpha = 2.0
        if number == 6:
            self.beta = 2.0
        if number == 7:
            helper.factor = 0.5


def _step_of(trainer, x, y):
    trainer.runs.append(1)
    return trainer.update(trainer.loss(trainer.model(x), y) * trainer.alpha)


class ByPartial(OtherAlpha):
    def __init__(self):
        super().__init__()
        self.step = functools.partial(_step_of, self)


class ByDefault(OtherAlpha):
    def __init__(self):
        super().__init__()

        def step(x, y, trainer=self):
            return _step_of(trainer, x, y)

        self.step = step


class ByObject(OtherAlpha):
    def __init__(self):
        super().__init__()
        self.step = _Step(self)


class _Step:
    def __init__(self, trainer):
        self.trainer = trainer

    def __call__(self, x, y):
        return _step_of(self.trainer, x, y)


class OtherDtype(Trainer):
    """The step makes a tensor of the default dtype."""

    def step(self, x, y):
        self.runs.append(1)
        return self.update(self.loss(self.model(x + torch.zeros(8).to(x.dtype)), y))

    def before(self, number):
        torch.set_default_dtype(torch.float64 if number in (4, 5, 6) else torch.float32)

    def arguments(self, number):
        return [each.float() for each in _batch(number)]


class EqualArguments(Trainer):
    """Two arguments are one tensor at first."""

    def arguments(self, number):
        x, y = _batch(number)
        return (x, x) if number < 4 else (x, y)


class RAdam(Trainer):
    """RAdam runs other ops from its sixth step on."""

    def __init__(self):
        super().__init__(lambda params, lr: torch.optim.RAdam(params, lr, foreach=False))


class Fails(Trainer):
    """An index is out of range: the update does not run, and its step counts stay."""

    def step(self, x, y, index):
        self.runs.append(1)
        return self.update(self.loss(self.model(x[index]), y))

    def arguments(self, number):
        return *_batch(number), torch.arange(4) + (90 if number == 4 else 0)


class FailsAtOnce(Fails):
    """The call that would be recorded raises."""

    def arguments(self, number):
        return *_batch(number), torch.arange(4) + (90 if number == 1 else 0)


class ReturnsParameters(Trainer):
    def step(self, x, y):
        return super().step(x, y), list(self.model.parameters())

    def values(self, result):
        return [part.full_tensor().tolist() for part in result[1]]


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


class GivesObjects(Trainer):
    """Batches that cannot be hashed, as those of tokenizers."""

    def step(self, batch):
        return super().step(batch.x, batch.y)

    def arguments(self, number):
        return (Batch(*_batch(number)),)


FOLLOWED = {
    LoadsState: 2, LoadsFusedState: 2, ClearsState: 4, NewOptimizer: 4, NewModel: 4, NewLoss: 4,
    NewActivation: 4, NewHook: 4, NewHookOnParameter: 4, OtherDropout: 4, TeacherInEval: 4,
    ReadsFurtherDown: 8, ReadsOfClasses: 8, ReadsByOtherWays: 8, ByPartial: 4, ByDefault: 4,
    ByObject: 4, RewritesRate: 2,
    OtherDtype: 5, EqualArguments: 4, RAdam: 4, Fails: 2, FailsAtOnce: 3,
    ReturnsParameters: 2, GivesObjects: CALLS,
}  # fmt: skip
"""The number of calls in which the Python of the step runs."""


class Schedules(Trainer):
    def __init__(self):
        super().__init__()
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)

    def step(self, x, y):
        loss = super().step(x, y)
        self.schedule.step()
        return loss


class SetsRate(Trainer):
    def step(self, x, y):
        loss = super().step(x, y)
        self.optimizer.param_groups[0]["lr"] *= 0.5
        return loss


class SetsRateBefore(Trainer):
    """The update does not change: the step sets the number that is there."""

    def step(self, x, y):
        self.optimizer.param_groups[0]["lr"] = 1e-2
        return super().step(x, y)


class SetsBetas(Trainer):
    """The update changes in no call: the step sets the betas that are there."""

    def step(self, x, y):
        self.optimizer.param_groups[0]["betas"] = (0.9, 0.999)
        return super().step(x, y)


class SetsRateAfter(Trainer):
    def step(self, x, y):
        loss = super().step(x, y)
        self.optimizer.param_groups[0]["lr"] = 1e-2
        return loss


class Notes(Trainer):
    def __init__(self):
        super().__init__()
        self.losses = []

    def step(self, x, y):
        self.losses.append(super().step(x, y).detach())
        return self.losses[-1]

    def values(self, result):
        return [loss.item() for loss in self.losses]


class Sets(Trainer):
    def step(self, x, y):
        self.last = super().step(x, y).detach()
        return self.last

    def values(self, result):
        return self.last.item()


class CountsFurtherDown(Trainer):
    def __init__(self):
        super().__init__()
        self.state = {"steps": 0}

    def step(self, x, y):
        self.state["steps"] += 1
        return super().step(x, y)

    def values(self, result):
        return self.state["steps"]


class CountsInModule(Trainer):
    def __init__(self):
        super().__init__()
        self.model.register_forward_hook(self.count)
        self.model.seen = 0

    def count(self, module, args, result):
        module.seen += 1

    def values(self, result):
        return self.model.seen


class Mixes(Trainer):
    def step(self, x, y):
        share = numpy.random.beta(0.5, 0.5) * random.random()
        return super().step(share * x + (1 - share) * x.flip(0), y)


class MixesByGenerator(Trainer):
    def __init__(self):
        super().__init__()
        self.drawn = numpy.random.default_rng(3)

    def step(self, x, y):
        return super().step(self.drawn.random() * x, y)


class Draws(Trainer):
    def step(self, x, y):
        generator = torch.Generator().manual_seed(0)
        return super().step(x + torch.randn(x.shape, generator=generator), y)


class ReadsList(Trainer):
    def step(self, x, y):
        return self.update(self.loss(self.model(x * y.sum(0).tolist()[0]), y))


class ReadsArray(Trainer):
    def step(self, x, y):
        return self.update(self.loss(self.model(x * float(numpy.asarray(y)[0, 0])), y))


class Compares(Trainer):
    def step(self, x, y):
        return self.update(self.loss(self.model(x), y) * (1 + torch.equal(x.sum() > 0, y > 9)))


class ReturnsObject(Trainer):
    def step(self, x, y):
        return Batch(super().step(x, y), y)

    def values(self, result):
        return result.x.item()


class Reduces(Trainer):
    def step(self, x, y):
        loss = super().step(x, y).detach().clone()
        dist.all_reduce(loss)
        return loss


REFUSED = {
    Schedules: "it changes", SetsRate: "lr of an optimizer",
    SetsRateBefore: "it sets lr", SetsBetas: "it sets betas", SetsRateAfter: "it changes lr",
    Notes: "self.losses[",
    Sets: "self.last", CountsFurtherDown: "self.state['steps']", CountsInModule: ".seen",
    Mixes: "random numbers of Python", MixesByGenerator: "random numbers of self.drawn",
    Draws: "torch.Generator", ReadsList: "on the host", ReadsArray: "on the host",
    Compares: "on the host", ReturnsObject: "type Batch", Reduces: "object of torch.distributed",
}  # fmt: skip


def _trained(kind, whole):
    """What is left of the training of one kind of trainer, and the step."""
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(dist.get_rank())
    trainer = kind()
    step = compile_step(trainer.step) if whole else trainer.step
    left = []
    for number in range(CALLS):
        trainer.before(number)
        try:
            left.append(trainer.values(step(*trainer.arguments(number))))
        except IndexError:
            left.append(None)
            trainer.optimizer.zero_grad()
    states = trainer.optimizer.state.values()
    left += [param._local.tolist() for param in trainer.model.parameters()]
    left += [getattr(v, "_local", v).tolist() for each in states for v in each.values()]
    return left, trainer, step


@pytest.mark.parametrize("kind", FOLLOWED, ids=lambda kind: kind.__name__)
@on_ranks(2)
def test_a_graph_follows(mesh, kind):
    separate, _, _ = _trained(kind, whole=False)
    whole, trainer, step = _trained(kind, whole=True)
    assert whole == separate
    assert step.reasons == []
    if kind is not NewModel:  # its trainer begins anew
        assert len(trainer.runs) == FOLLOWED[kind]


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
@on_ranks(2)
def test_a_step_that_does_more_is_refused(mesh, kind):
    separate, _, _ = _trained(kind, whole=False)
    whole, _, step = _trained(kind, whole=True)
    assert whole == separate
    assert REFUSED[kind] in step.reasons[0]
    assert step.graphs == []


class Decorated(Trainer):
    step = compile_step(Trainer.step)


@on_ranks(2)
def test_a_method_has_graphs_for_each_object(mesh):
    assert isinstance(Decorated.step.step, types.FunctionType)
    runs = []
    for kind in (Trainer, Decorated):
        trainers = [kind(), kind()]
        losses = [each.step(*_batch(n)).item() for n in range(4) for each in trainers]
        runs.append((losses, [each.runs for each in trainers]))
    assert runs[0][0] == runs[1][0]
    assert runs[1][1] == [[1, 1], [1, 1]]
    assert [len(each.step.graphs) for each in trainers] == [1, 1]
    again = copy.copy(trainers[0].step)
    assert (again.graphs, len(trainers[0].step.graphs)) == ([], 1)
    assert copy.copy(trainers[0]).step.graphs == []


@on_ranks(2)
def test_a_step_inside_of_a_step_is_a_part_of_it(mesh):
    runs = []
    for whole in (False, True):
        wrap = compile_step if whole else lambda step: step
        inner, outer = Trainer(), Trainer()
        own = wrap(inner.step)

        def both(x, y, own=own, outer=outer):
            return own(x, y) + outer.step(x, y)

        step = wrap(both)
        losses = [own(*_batch(n)).item() for n in range(3)]
        for number in range(5):
            inner.optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
            losses.append(step(*_batch(number)).item())
        runs.append((losses, [p._local.tolist() for p in inner.model.parameters()]))
    assert runs[0] == runs[1]
    assert (len(step.graphs), step.reasons) == (1, [])


def test_an_object_is_the_same_as_itself_alone():
    one, other = Batch(torch.ones(2), torch.ones(2)), Batch(torch.ones(2), torch.ones(2))
    assert Same(one) == Same(one) != Same(other)
    was = Same(one)
    del one
    assert was != was  # it is gone, and another object may have its id
    assert Same((1, 2)) != Same((1, 3))
