"""Idioms of DTensor around a step, as codebases write them: by FSDP2 and by shardc.

Each idiom reads or writes the parameters, gradients or optimizer state of a model after two steps.
What it gives, the parameters and the next gradients must be equal, or one side must refuse by name.
"""

import pytest
import torch
import torch.distributed as dist
from models import Stack, seeded
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.experimental import local_map

import shardc

TOKENS = torch.arange(12).view(2, 6) % 31
IDIOMS = {}


def idiom(codebases, **expected):
    """Register a function `(model, optimizer) -> tensors | None` under its name and codebases.

    Args:
        expected: `ours` or `theirs`: the words of an error of that side; `gives`: a function of the
            model that gives the values by shardc, where FSDP2 gives others or none.
    """

    def register(function):
        name = f"{function.__name__.replace('_', ' ')}: {codebases}"
        IDIOMS[name] = (function, expected)
        return function

    return register


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def like(local, other):
    """A DTensor from this rank's part, placed as `other`."""
    return DTensor.from_local(
        local, other.device_mesh, other.placements,
        run_check=False, shape=other.shape, stride=other.stride(),
    )  # fmt: skip


def grads(model):
    return [param.grad for param in model.parameters()]


def matrices(model):
    return [value for value in model.state_dict().values() if value.ndim == 2]


# -- parts ----------------------------------------------------------------------------------------


@idiom("verl, PEFT")
def local_parts_are_kept_and_copied_back(model, _):
    kept = {n: p._local_tensor.detach().cpu().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    doubled = [whole(param).clone() for param in model.parameters()]
    for name, param in model.named_parameters():
        param._local_tensor.copy_(kept[name])
    return doubled


@idiom("verl's merger", ours="FlatShard")
def local_parts_are_joined_by_placement(model, _):
    joined = []
    for param in model.parameters():
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, param._local_tensor.detach().clone())
        (placement,) = param.placements
        if not placement.is_shard():
            raise NotImplementedError(f"a placement that is not known: {placement}")
        joined.append(torch.cat(parts, dim=placement.dim))
    return joined


@idiom("accelerate, torchtitan, TRL")
def local_parts_keep_their_memory(model, optimizer):
    def places():
        held = [param._local_tensor for param in model.parameters()]
        return [part.untyped_storage().data_ptr() + part.storage_offset() for part in held]

    before = places()
    model(TOKENS, TOKENS).backward()
    optimizer.step()
    assert before == places()


@idiom("torchtune, sglang")
def a_distributed_value_is_copied_part_to_part(model, _):
    for param in model.parameters():
        value = torch.arange(param.numel()).view(param.shape) / param.numel()
        placed = distribute_tensor(value, param.device_mesh, param.placements)
        param._local_tensor.copy_(placed._local_tensor)


@idiom("transformers, PEFT, torchao")
def a_part_becomes_a_dtensor_like_its_parameter(model, _):
    made = []
    for param in model.parameters():
        made.append(like(param.to_local().detach().clone() * 2, param))
        with torch.no_grad():
            param.copy_(made[-1])
    return made


@idiom("sglang, local_map")
def a_part_becomes_a_dtensor_without_a_shape(model, _):
    even = [param.detach() for param in model.parameters() if param.shape[0] % 2 == 0]
    return [DTensor.from_local(p.to_local(), p.device_mesh, p.placements) for p in even]


@idiom("torchao's PARQ")
def a_function_of_parts_by_local_map(model, _):
    even = [param.detach() for param in model.parameters() if param.shape[0] % 2 == 0]
    return [
        local_map(torch.sign, [*p.placements], (p.placements,), device_mesh=p.device_mesh)(p)
        for p in even
    ]


@idiom("verl, OLMo-core, transformers, sglang")
def a_part_is_cut_from_a_whole_by_its_offsets(model, _):
    for param in model.parameters():
        sizes, offsets = compute_local_shape_and_global_offset(
            param.shape, param.device_mesh, param.placements
        )
        assert sizes == tuple(param.to_local().shape)
        box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        value = whole(param.detach()) + 1
        param.to_local().detach().copy_(value[box])


@idiom("vLLM's examples of RLHF")
def rows_of_a_part_are_read_one_by_one(model, _):
    with torch.no_grad():
        for param in model.parameters():
            value, local = whole(param.detach()) * 2, param.to_local().detach()
            sizes, offsets = compute_local_shape_and_global_offset(
                param.shape, param.device_mesh, param.placements
            )
            local.zero_()
            for row in range(sizes[0]):
                local[row].copy_(value[offsets[0] + row])


@idiom("verl's sparse weights")
def changed_positions_of_parts_are_gathered(model, _):
    found = []
    for param in model.parameters():
        part = param._local_tensor.detach().flatten()
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, part)
        start = sum(len(each) for each in parts[: dist.get_rank()])
        sent = [None] * dist.get_world_size()
        dist.all_gather_object(sent, (torch.arange(len(part)) + start, part))
        value = torch.zeros(param.numel())
        for places, values in sent:
            value[places] = values
        found.append(value.view(param.shape))
    return found


@idiom("transformers")
def elements_of_parts_are_counted(model, _):
    count = torch.tensor(sum(param._local_tensor.numel() for param in model.parameters()))
    dist.all_reduce(count)
    return [count, torch.tensor(sum(param.numel() for param in model.parameters()))]


# -- placements -----------------------------------------------------------------------------------


@idiom("transformers")
def strided_placements_are_redistributed(model, _):
    placed = []
    for param in model.parameters():
        wanted = tuple(
            Shard(each.dim) if type(each).__name__ == "_StridedShard" else each
            for each in param.placements
        )
        same = wanted == param.placements
        placed.append(param if same else param.redistribute(placements=wanted))
    return placed


@idiom("OLMo-core, accelerate, torchtune, litgpt")
def a_whole_is_distributed_like_a_parameter(model, _):
    return [
        distribute_tensor(whole(p.detach()) + 1, device_mesh=p.device_mesh, placements=p.placements)
        for p in model.parameters()
    ]


@idiom("OLMo-core")
def a_gradient_is_redistributed_like_its_parameter(model, _):
    return [
        (p.grad * 2).redistribute(device_mesh=p.device_mesh, placements=p.placements)
        for p in model.parameters()
    ]


@idiom("verl, TRL")
def a_parameter_is_replicated(model, _):
    return [p.redistribute(placements=[Replicate()]).to_local() for p in model.parameters()]


@idiom("verl")
def specs_of_a_parameter_and_its_gradient_are_equal(model, _):
    for param in model.parameters():
        assert param._spec.placements == param.grad._spec.placements
        assert param.placements == param.detach().placements


# -- norms ----------------------------------------------------------------------------------------


@idiom("accelerate, torchtitan, OLMo-core")
def norms_of_each_mesh_are_joined(model, _):
    groups = {}
    for param in model.parameters():
        groups.setdefault(param.grad.device_mesh, []).append(param)
    norms = [nn.utils.get_total_norm([p.grad for p in held]) for held in groups.values()]
    total = torch.linalg.vector_norm(torch.stack([whole(norm) for norm in norms]))
    for held in groups.values():
        nn.utils.clip_grads_with_norm_(held, 0.1, total)
    return [total, *grads(model)]


@idiom("OLMo-core, torchao")
def squares_of_parts_are_reduced(model, _):
    total = sum(grad.to_local().square().sum() for grad in grads(model))
    dist.all_reduce(total)
    return [total.sqrt()]


@idiom("torch's clip_grad, by hand")
def foreach_norms_are_stacked(model, _):
    norms = torch._foreach_norm(grads(model))
    return [*norms, torch.linalg.vector_norm(torch.stack(norms))]


@idiom("transformers, TRL")
def norms_are_stacked(model, _):
    return [torch.stack([grad.detach().norm() for grad in grads(model)])]


@idiom("OLMo-core's skipped steps, GradScaler")
def finite_gradients_are_told(model, _):
    of_parts = torch.stack([grad.to_local().isfinite().all() for grad in grads(model)]).all()
    return [of_parts, *(grad.isfinite().all() for grad in grads(model))]


@idiom("verl's metrics")
def means_and_differences_are_taken(model, _):
    other = [param.detach().clone() * 1.5 for param in model.parameters()]
    pairs = list(zip(model.parameters(), other, strict=True))
    means = [param.detach().float().mean() for param, _ in pairs]
    return means + [(param.detach() - value).abs().max() for param, value in pairs]


@idiom(
    "logging by hand",
    gives=lambda model: [torch.tensor(whole(grad).sum().item()) for grad in grads(model)],
)
def a_sum_becomes_a_number(model, _):
    """A DTensor's sum is partial, and `item` gives this rank's share."""
    return [torch.tensor(grad.sum().item()) for grad in grads(model)]


# -- writes ---------------------------------------------------------------------------------------


@idiom("TRL's reference model, verl's LoRA merge")
def data_is_kept_and_copied_back(model, _):
    kept = {name: param.data.clone() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.data.mul_(3)
    for name, param in model.named_parameters():
        param.data.copy_(kept[name])


@idiom("sglang")
def a_distributed_value_is_copied_into_data(model, _):
    for param in model.parameters():
        value = torch.ones(param.shape) * 0.3
        param.data.copy_(distribute_tensor(value, param.device_mesh, param.placements))


@idiom(
    "verl, TRL",
    theirs="mixed torch.Tensor and DTensor",
    gives=lambda model: [torch.full(param.shape, 0.25) for param in model.parameters()],
)
def a_whole_value_is_copied_into_data(model, _):
    for param in model.parameters():
        param.data.copy_(torch.full(param.shape, 0.25))
    return list(model.parameters())


@idiom(
    "accelerate's local SGD",
    gives=lambda model: [whole(param.detach()) * 0.5 for param in model.parameters()],
)
def data_is_assigned(model, _):
    """A DTensor ignores the assigned value, which is taken back here."""
    for param in model.parameters():
        param.data = param.data * 0.5
    halves = [whole(param.detach()).clone() for param in model.parameters()]
    for param in model.parameters():
        param.data = param.data * 2
    return halves


@idiom("torchtune, OLMo-core")
def parts_of_gradients_and_parameters_are_written(model, _):
    with torch.no_grad():
        for param in model.parameters():
            param.grad._local_tensor.mul_(2)
            param.grad.to_local().add_(1)
            param.to_local().mul_(0.5)
    return grads(model)


@idiom("verl, torchao")
def a_gradient_is_assigned(model, _):
    for param in model.parameters():
        param.grad = like(param.grad.to_local() * 3, param)
    return grads(model)


# -- optimizers -----------------------------------------------------------------------------------


@idiom("torchtitan, DCP")
def a_step_without_a_rate_makes_state(model, _):
    made = torch.optim.AdamW(model.parameters(), lr=0.0)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    made.step()
    return [state["exp_avg"] for state in made.state.values()]


@idiom("OLMo-core")
def an_update_is_scaled_by_a_factor(model, optimizer):
    factor = torch.tensor(0.5)
    with torch.no_grad():
        for param in model.parameters():
            state = optimizer.state[param]
            update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8)
            param.add_(update.mul_(factor), alpha=-0.1)


@idiom("torchao, verl's offload")
def state_is_made_of_parts(model, optimizer):
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, DTensor):
                state[key] = like(value.to_local().to(torch.bfloat16).float(), value)
    optimizer.step()
    return [state["exp_avg"] for state in optimizer.state.values()]


@idiom("dinov3, PEFT's EMA")
def a_mean_follows_the_parameters(model, optimizer):
    means = [param.detach().clone() for param in model.parameters()]
    model(TOKENS, TOKENS).backward()
    optimizer.step()
    now = [param.detach() for param in model.parameters()]
    for mean, value in zip(means, now, strict=True):
        mean.lerp_(value, 0.1)
    torch._foreach_lerp_(means, now, 0.3)
    return means


@idiom("torchao, OLMo-core")
def small_gradients_become_zeros(model, _):
    return [torch.where(g.abs() > 1e-4, g, torch.zeros_like(g)) for g in grads(model)]


# -- values for engines and files -----------------------------------------------------------------


@idiom("vLLM, verl, TRL, dinov3, litgpt")
def whole_values_are_taken_one_by_one(model, _):
    return [
        p.full_tensor().detach().to(torch.bfloat16).cpu()
        for p in model.parameters()
        if hasattr(p, "_local_tensor") and p.numel() * p.element_size() > 0
    ]


@idiom("torchtitan's adapters")
def values_are_transposed_cut_and_joined(model, _):
    held = matrices(model)
    wide = [value for value in held if value.shape[1] == held[0].shape[1]]
    halves = [half for value in held for half in value.chunk(2, dim=1)]
    rows = [row for value in held for row in (value[:2], value[1])]
    return [*halves, *rows, *(value.t().contiguous() for value in held), torch.cat(wide)]


@idiom("torchtitan's Llama adapter")
def heads_of_a_value_are_permuted(model, _):
    value = matrices(model)[0][:30]
    return [value.view(3, 5, 2, -1).transpose(1, 2).reshape(30, -1).clone()]


@idiom("transformers' ties, verl's checks")
def parameters_are_compared(model, _):
    copies = [param.detach().clone() for param in model.parameters()]
    found = [torch.equal(p, q) for p, q in zip(model.parameters(), copies, strict=True)]
    with torch.no_grad():
        copies[0].add_(1)
    found.append(torch.equal(next(model.parameters()), copies[0]))
    assert found == [True] * len(copies) + [False]


# -- the two sides --------------------------------------------------------------------------------


def trained(shard, mesh):
    """A model after two steps, with its gradients, and its optimizer."""
    model = seeded(Stack)
    for layer in model.layers:
        shard(layer, mesh=mesh)
    shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(TOKENS + step + dist.get_rank(), TOKENS).backward()
        optimizer.step()
    return model, optimizer


def results(function, model, optimizer) -> list[Tensor]:
    """The result of an idiom, the parameters after it, and the gradients of a step after it."""
    given = [whole(each).detach().clone() for each in function(model, optimizer) or []]
    after = [whole(param).detach().clone() for param in model.parameters()]
    optimizer.zero_grad()
    model(TOKENS + dist.get_rank(), TOKENS).backward()
    return [*given, *after, *(whole(grad).detach().clone() for grad in grads(model))]


@pytest.mark.parametrize("name", IDIOMS)
@on_ranks(2)
def test_an_idiom_of_dtensor(mesh, name):
    function, expected = IDIOMS[name]
    found = {}
    for side, shard in (("theirs", torch_fully_shard), ("ours", shardc.fully_shard)):
        model, optimizer = trained(shard, mesh)
        if side in expected:
            with pytest.raises((RuntimeError, ValueError, NotImplementedError)) as raised:
                function(model, optimizer)
            assert expected[side] in str(raised.value)
        else:
            truth = [each.clone() for each in expected.get("gives", lambda _: [])(model)]
            found[side] = results(function, model, optimizer)
    if "gives" in expected:
        torch.testing.assert_close(found["ours"][: len(truth)], truth)
        found = {side: values[len(truth) :] for side, values in found.items()}
    if len(found) == 2:
        torch.testing.assert_close(found["ours"], found["theirs"], atol=2e-5, rtol=1e-4)
