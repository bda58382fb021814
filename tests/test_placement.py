"""Which devices are taken together, what is cut and what stays, and who is told of a refusal."""

import gc
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch
import torch.distributed as dist
from models import (
    Block,
    Stack,
    batch_of,
    check_parity,
    full,
    is_unsharded,
    on_meta,
    seeded,
    shard_all,
    tokens,
)
from ranks import on_ranks
from torch import nn

from shardc import MixedPrecisionPolicy, ShardTensor, fully_shard, units_of
from shardc.sharding.placement import check_devices, compute_device

# -- devices ---------------------------------------------------------------------------------------


class _At:
    """Has a device and nothing else."""

    is_meta = False

    def __init__(self, device):
        self.device = torch.device(device)


def test_which_devices_are_taken_together():
    card = torch.device("cuda", 1)
    taken = {"a": _At("cpu"), "b": _At("cuda:1")}
    check_devices(taken, card)  # the CPU's part is cut onto the card
    check_devices({"a": _At("meta"), "b": _At("meta")}, card)
    check_devices({"a": _At("meta"), "b": _At("cpu")}, card, mixed=True)
    for more, device, words in (
        ("cuda:0", card, r"'c' is on cuda:0, but the current device .*set_device\(0\)"),
        ("xpu:1", card, "'c' is on xpu:1, the mesh on 'cuda'"),
        ("cuda:1", torch.device("cpu"), "'b' is on cuda:1, the mesh on 'cpu'"),
        ("meta", card, r"'c' is on meta and 'a' on cpu"),
    ):
        with pytest.raises(ValueError, match=words):
            check_devices({**taken, "c": _At(more)}, device)


@on_ranks(2)
def test_placement_on_the_mesh_and_several_devices(mesh):
    assert compute_device(mesh) == torch.device("cpu")
    model = fully_shard(Block(), mesh=mesh)
    assert model._shardc_unit.device.type == "cpu"
    assert {b.segment.device.type for b in model._shardc_unit.buckets} == {"cpu"}
    mixed = Stack()
    mixed.layers[1].up.to("meta")
    rank = mesh.get_local_rank()
    words = r"'layers.1.up.weight' \(and 1 more\) is on meta and 'embed.weight' on cpu"
    with pytest.raises(ValueError, match=words):
        fully_shard(mixed, mesh=mesh)
    assert is_unsharded(mixed)
    other = mixed if rank else Stack()  # one rank only: the other is told, long before a timeout
    with pytest.raises((ValueError, RuntimeError), match=words):
        fully_shard(other, mesh=mesh)
    assert is_unsharded(other)
    half = on_meta() if rank else Stack()
    with pytest.raises(ValueError, match=r"ranks disagree.*on meta.*sync_module_states=True"):
        fully_shard(half, mesh=mesh, param_init_fn=lambda module: None)
    assert is_unsharded(half)
    shard_all(Stack(), mesh)  # ranks are in step again


@on_ranks(2, device="sim")
def test_parameters_go_to_the_current_device_of_the_mesh(mesh):
    plain, model = seeded(Stack), seeded(Stack)
    here = torch.device("sim", torch.accelerator.current_device_index())
    model.layers[0].to("sim")  # a part is there, the rest on the host
    model.register_buffer("scale", torch.ones(2))
    model.embed.weight.grad = torch.ones(31, 18)
    assert {p.device.type for p in model.parameters()} == {"cpu", "sim"}
    assert compute_device(mesh) == here
    shard_all(model, mesh)
    assert {p.to_local().device for p in model.parameters()} == {here} == {model.scale.device}
    assert model.embed.weight.grad.to_local().device == here
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(full(q).cpu(), p)
    x = tokens(0)
    torch.testing.assert_close(model(x.to("sim")).cpu(), plain(x))


@on_ranks(3)
def test_a_refusal_on_one_rank_is_told_to_all(mesh):
    rank = mesh.get_local_rank()
    lazy, fine = nn.LazyLinear(3), nn.Linear(3, 3)
    for unlucky in range(3):
        for bad, kind, words in (
            ({"units": "blocks"}, ValueError, "units must be"),
            ({"param_init_fn": 3}, TypeError, "param_init_fn must be a function"),
            ({"mp_policy": 3}, TypeError, "mp_policy must be"),
            ({"reshard_after_forward": 2}, ValueError, "divisor of the world size"),
        ):
            model = Block()
            with pytest.raises(Exception, match=words) as raised:
                fully_shard(model, mesh=mesh, **(bad if rank == unlucky else {}))
            assert type(raised.value) is (kind if rank == unlucky else RuntimeError)
            if rank != unlucky:
                assert f"rank {unlucky} refuses the parameters" in str(raised.value)
            assert is_unsharded(model)
        with pytest.raises(Exception, match="not initialized"):
            fully_shard(lazy if rank == unlucky else fine, mesh=mesh)
        assert is_unsharded(fine)
    model = shard_all(seeded(Stack), mesh)
    check_parity(seeded(Stack), model, model, batch_of, mesh)


# -- what is cut, and what stays -------------------------------------------------------------------


@on_ranks(2, 3)
def test_existing_gradients_are_cut_and_full_storage_is_freed(mesh):
    plain, model = seeded(Stack), seeded(Stack)
    for each in (plain, model):
        each(tokens(0), tokens(1)).backward()
        each.layers[0].up.bias.grad = None
    storages = [
        weakref.ref(t.untyped_storage())
        for p in model.parameters()
        for t in (p, p.grad)
        if t is not None
    ]
    shard_all(model, mesh)
    gc.collect()
    assert len(storages) > 20 and not any(ref() for ref in storages)
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert isinstance(q, ShardTensor), f"{name} is left unsharded"
        assert (q.grad is None) == (p.grad is None), name
        if p.grad is not None:
            assert isinstance(q.grad, ShardTensor) and torch.equal(full(q.grad), p.grad), name
    for each in (plain, model):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
        each.zero_grad()
    check_parity(plain, model, model, batch_of, mesh)


@on_ranks(2)
def test_ignored_modules_keep_their_buffers(mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    inner = nn.Sequential(nn.BatchNorm1d(3))
    model.append(inner)
    fully_shard(inner, mesh=mesh, ignored_params=[inner[0]], mp_policy=policy)
    fully_shard(model, mesh=mesh, ignored_params=[model[1]], mp_policy=policy)
    assert model[0].running_mean.dtype == torch.bfloat16
    assert model[1].running_mean.dtype == inner[0].running_mean.dtype == torch.float32
    assert not isinstance(model[1].weight, ShardTensor)


@pytest.mark.parametrize("kind", ["replicate", "ddp"])
@on_ranks(2)
def test_replicated_submodules_are_left_alone(mesh, kind):
    from torch.distributed._composable.replicate import replicate

    torch.manual_seed(0)
    model, plain = (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    if kind == "replicate":
        replicate(model[1])
    else:
        model[1] = nn.parallel.DistributedDataParallel(model[1])
    fully_shard(model, mesh=mesh)
    assert isinstance(model[0].weight, ShardTensor)
    assert not any(isinstance(p, ShardTensor) for p in model[1].parameters())
    x = torch.full((2, 3), mesh.get_local_rank() + 1.0)
    model(x).sum().backward()
    plain(x).sum().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        dist.all_reduce(p.grad)
        torch.testing.assert_close(full(q.grad), p.grad / 2)
    with pytest.raises(ValueError, match="replicated by DDP or replicate"):
        fully_shard(model[1], mesh=mesh)


@on_ranks(2)
def test_outermost_units_only(mesh):
    model = nn.Sequential(shard_all(Stack(), mesh), fully_shard(Block(), mesh=mesh), nn.ReLU())
    assert list(units_of(model)) == ["0", "0.layers.0", "0.layers.1", "1"]
    assert list(units_of(model, root_only=True)) == ["0", "1"]


def test_checks_survive_python_O():
    script = """
        import torch, torch.distributed as dist
        from torch import nn
        from shardc import fully_shard, materialize
        assert False, "asserts are on"
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
        meta = fully_shard(nn.Linear(2, 2, device="meta"))
        made = nn.Linear(2, 2)
        loss = made(torch.ones(1, 2, requires_grad=True)).sum()
        for run in (
            lambda: fully_shard(mixed),
            lambda: fully_shard(made),
            lambda: fully_shard(fully_shard(nn.Linear(2, 2))),
            lambda: fully_shard(nn.Linear(2, 2), param_init_fn=3),
            lambda: meta(torch.ones(1, 2)),
        ):
            try:
                run()
                print("accepted")
            except (ValueError, TypeError, RuntimeError) as error:
                print(type(error).__name__)
    """
    command = [sys.executable, "-O", "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = ["ValueError", "ValueError", "ValueError", "TypeError", "RuntimeError"]
    assert done.stdout.split() == expected, done.stdout
