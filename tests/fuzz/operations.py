"""Operations around a step, as functions that the scripts of the fuzzer hold.

Each takes one side, the plain model or the sharded one, with what runs it, its optimizer and a
batch of this rank, and gives tensors that must be equal on both sides. The text of those that a
script calls is copied into it, after the harness's.
"""

import copy
import io
import itertools
import math

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as torch_states
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fuzz.harness import spoil

# -- averages and copies ---------------------------------------------------------------------------


def evaluated(model, x):
    model.eval()
    with torch.no_grad():
        out = model(x)
    model.train()
    return out


def scale_all(model, factor):
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                p.mul_(factor)


def average_weights(model, call, optimizer, x):
    return averaged(AveragedModel(call if isinstance(call, nn.Module) else model), model, x)


def moving_average(model, call, optimizer, x):
    kept = get_ema_multi_avg_fn(0.7)
    return averaged(AveragedModel(model, multi_avg_fn=kept), model, x)


def averaged(average, model, x):
    for factor in (2.0, 0.25, 2.0):
        average.update_parameters(model)
        scale_all(model, factor)
    return [*average.parameters(), evaluated(average, x)]


def go_on_with_copy(model, call, optimizer, caller):
    """A copy in training, with what compiled the model; the model is spoiled."""
    new_call = copy.deepcopy(call) if isinstance(call, nn.Module) else None
    new = copy.deepcopy(model) if new_call is None else getattr(new_call, "_orig_mod", new_call)
    new_optimizer = renewed(optimizer, new)
    spoil(model)
    return new, caller(new) if new_call is None else new_call, new_optimizer


# -- functional calls ------------------------------------------------------------------------------


def called_with(model, call, values, x):
    model = call if isinstance(call, nn.Module) else model
    with torch.no_grad():
        return [functional_call(model, values, (x,)), model(x)]


def scaled(model, call):
    model = call if isinstance(call, nn.Module) else model
    named = model.named_parameters()
    return {name: p.detach() * 0.9 for name, p in named if p.is_floating_point()}


def call_with_scaled(model, call, optimizer, x):
    return called_with(model, call, scaled(model, call), x)


def call_with_whole(model, call, optimizer, x):
    values = {name: whole(value) for name, value in scaled(model, call).items()}
    return called_with(model, call, values, x)


def call_with_one(model, call, optimizer, x):
    values = dict(list(scaled(model, call).items())[1:2])
    return called_with(model, call, values, x)


def train_what_is_given(model, call, optimizer, x):
    """Whole values that are trained for one step: each rank has its own gradients."""
    model = call if isinstance(call, nn.Module) else model
    values = {name: whole(value).requires_grad_() for name, value in scaled(model, model).items()}
    values, x.grad = dict(list(values.items())[::2]), None
    functional_call(model, values, (x,)).square().mean().backward()
    model.zero_grad()
    return [x.grad.clone(), *(v.grad for v in values.values() if v.grad is not None)]


# -- saving and loading ----------------------------------------------------------------------------


def save_each(model, call, optimizer, x):
    """Each rank saves and loads its own."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    spoil(model)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=False))
    return []


def save_full_by_torch(model, call, optimizer, x):
    options = torch_states.StateDictOptions(full_state_dict=True)
    state = torch_states.get_model_state_dict(model, options=options)
    assert not any(isinstance(value, DTensor) for value in state.values())
    kept = {name: value.clone() for name, value in state.items()}
    spoil(model)
    model.load_state_dict(kept)
    return list(kept.values())


def broadcast_by_torch(model, call, optimizer, x):
    """Rank 0 has all, and gives it to the others; buffers stay those of each rank."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    options = torch_states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = torch_states.get_model_state_dict(model, options=options)
    state = {name: value.clone() for name, value in state.items()}
    spoil(model)
    options = torch_states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    torch_states.set_model_state_dict(model, state, options=options)
    for buffer, value in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(value)
    return []


def load_as(model, placements_of):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in state.items():
        if isinstance(value, DTensor):
            placements = placements_of(value)
            state[name] = distribute_tensor(value.full_tensor(), value.device_mesh, placements)
    spoil(model)
    model.load_state_dict(state)
    return []


def load_distributed(model, call, optimizer, x):
    return load_as(model, lambda value: value.placements)


def load_rows(model, call, optimizer, x):
    def placements(value):
        rows = Shard(0) if value.dim() else Replicate()
        return [*[Replicate()] * (value.device_mesh.ndim - 1), rows]

    return load_as(model, placements)


def assign_state(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    spoil(model)
    model.load_state_dict(state, assign=True)


# -- parameters and optimizers ---------------------------------------------------------------------


def renewed(optimizer, model):
    """A new optimizer for the parameters of `model`, with the state of another."""
    new = make_optimizer(model)  # noqa: F821
    if len(optimizer.param_groups) > 1:
        add_group(model, None, new, None)
    new.load_state_dict(optimizer.state_dict())
    return new


def doubled(optimizer, model):
    model.double()
    return renewed(optimizer, model)


def add_group(model, call, optimizer, x):
    """The second half of the parameters become a group with another learning rate."""
    if len(optimizer.param_groups) == 1:
        params = optimizer.param_groups[0]["params"]
        later = params[(len(params) + 1) // 2 :]
        del params[(len(params) + 1) // 2 :]
        if later:
            optimizer.add_param_group({"params": later, "lr": 0.02})
    return []


def assign_data(model, call, optimizer, x):
    """Whole values for every other parameter, parts for the rest."""
    for index, p in enumerate(model.parameters()):
        if p.is_floating_point():
            p.data = whole(p.detach()) * 0.9 if index % 2 else p.data * 0.9
    return []


def change_in_place(model, call, optimizer, x):
    changes = itertools.cycle(
        [
            lambda p: p.mul_(0.9),
            lambda p: p.copy_(p * 0.9),
            lambda p: p.copy_(whole(p) * 0.9),
            lambda p: p.data.mul_(0.9),
            lambda p: p.data.copy_(p.detach() * 0.9),
        ]
    )
    with torch.no_grad():
        for p, change in zip(model.parameters(), changes, strict=False):
            if p.is_floating_point():
                change(p)
    return []


def unfreeze(model, call, optimizer, x):
    for p in model.parameters():
        p.requires_grad_(p.is_floating_point())
    return []


def step_by_hand(model, call, optimizer, x):
    with torch.no_grad():
        for p in trained(model):
            p -= 0.1 * p
            p.add_(p.square(), alpha=1e-3)
            p.clamp_(-2, 2)
    return []


def assign_parameters(model, call, optimizer, x):
    """Another parameter takes the place of one that no other module holds; so in the optimizer."""
    shared = [p for _, p in model.named_parameters(remove_duplicate=False)]
    for name, p in list(model.named_parameters()):
        if p.is_floating_point() and sum(p is other for other in shared) == 1:
            path, _, last = name.rpartition(".")
            new = nn.Parameter(p.detach().clone() * 0.9, p.requires_grad)
            setattr(model.get_submodule(path), last, new)
            now = model.get_submodule(path)._parameters[last]
            if p in optimizer.state:
                optimizer.state[now] = optimizer.state.pop(p)
            for group in optimizer.param_groups:
                group["params"] = [now if each is p else each for each in group["params"]]
            break
    return []


def reload_optimizer(model, call, optimizer, x):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=False))
    return []


def move(model, call, optimizer, x):
    model.to("cpu")
    return []


def read_parameters(model, call, optimizer, x):
    seen = []
    for p in model.parameters():
        if p.is_floating_point() and p.numel():
            seen += [p.sum(), p.detach().square().mean(), p.norm(), p.abs().max(), whole(p)]
            seen += [p[-1], p.sum(0), p.t() if p.dim() == 2 else p] if p.dim() else [p + 1]
    seen += [value for value in model.state_dict().values() if value.numel()]
    return [value.detach() for value in seen]


def read_slices(model, call, optimizer, x):
    seen = []
    for p in model.parameters():
        if p.is_floating_point() and p.dim() and p.numel():
            seen += [
                p[0], p[:2], p[..., -1], p.view(-1), p.mean(-1), torch.stack([p, p]), -p.clone(),
                torch.cat([p, p]), p.reshape(-1)[:3], p.std(unbiased=False),
                whole(p).reshape(-1)[p.argmax()],  # of equal ones another may be greatest
            ]  # fmt: skip
    return [value.detach() for value in seen]


# -- gradients -------------------------------------------------------------------------------------


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def with_gradients(model):
    return [p for p in model.parameters() if p.grad is not None]


def norm_by_hand(model):
    """As codebases compute it: parts are squared, and joined by an all-reduce."""
    parts, rest = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for p in with_gradients(model):
        if isinstance(p.grad, DTensor):
            dims = zip(p.grad.placements, p.grad.device_mesh.shape, strict=True)
            copies = math.prod(size for placement, size in dims if placement.is_replicate())
            parts += p.grad.to_local().double().square().sum() / copies
        else:
            rest += p.grad.double().square().sum()
    dist.all_reduce(parts)
    return [(parts + rest).sqrt()]


def clip_values(model):
    """Near the largest: what is clipped keeps its rounding, by which gradients are compared."""
    sizes = [whole(p.grad).abs().max().item() for p in with_gradients(model) if p.numel()]
    if sizes:  # torch clips no empty list
        nn.utils.clip_grad_value_(model.parameters(), 0.8 * max(sizes))
    return []


def halve_gradients(model):
    for p in with_gradients(model):
        p.grad *= 0.5
    return []


def halve_gradients_at_once(model):
    grads = [p.grad for p in with_gradients(model)]
    if grads:
        torch._foreach_mul_(grads, 0.5)
    return []


def replace_gradients(model):
    for p in with_gradients(model):
        p.grad = p.grad.clone() * 0.5
    return []


def give_whole_gradients(model):
    for p in with_gradients(model):
        p.grad = whole(p.grad) * 0.5
    return []


def drop_a_gradient(model):
    for p in with_gradients(model)[:1]:
        p.grad = None
    return []


# -- ties ------------------------------------------------------------------------------------------


def tie(model):
    """Two linear layers whose weights are alike share one."""
    groups = {}
    for module in model.modules():
        if isinstance(module, nn.Linear) and "weight" in module._parameters:
            weight = module.weight
            key = (weight.shape, weight.dtype, weight.requires_grad)
            groups.setdefault(key, []).append(module)
    for first, *_, last in (group for group in groups.values() if len(group) > 1):
        last.weight = first.weight
        break
