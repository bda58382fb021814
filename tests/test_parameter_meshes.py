"""Parameters of one call on two meshes: `shard_placement_fn` gives `ShardPlacementResult`s."""

import copy

import pytest
import torch
import torch.distributed as dist
from models import seeded
from ranks import mesh_of, on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard

import shardc

common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
if not hasattr(common, "ShardPlacementResult"):
    pytest.skip("this torch has no ShardPlacementResult", allow_module_level=True)


class Experts(nn.Module):
    """Weights of this rank's experts, as torchtitan's `GroupedExperts` holds them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(2, 6, 6) / 3) for _ in range(2))

    def forward(self, x):
        return (x @ self.up).relu() @ self.down


class Block(nn.Module):
    """A dense layer, then experts that lie on fewer ranks."""

    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.moe = nn.ModuleDict({"experts": Experts()})

    def forward(self, x):
        return self.moe["experts"](self.norm(self.dense(x))).sum(0)


def sharded(shard, world, inner, placement=None, **options):
    """A model of two blocks: experts on the mesh `inner`, the rest on `world`."""
    model = seeded(lambda: nn.Sequential(Block(), Block()))
    info = {mesh: common.FSDPMeshInfo(mesh, shard_mesh_dim=0) for mesh in (world, inner)}
    for block in model:
        theirs = set(block.moe.parameters())

        def place(param, theirs=theirs):
            if param in theirs:
                return common.ShardPlacementResult(placement, info[inner])
            return common.ShardPlacementResult(Shard(0), info[world])

        shard(block, mesh=world, shard_placement_fn=place, **options)
    return shard(model, mesh=world, **options)


@pytest.mark.parametrize("placement", [None, Shard(0), Shard(1)])
@pytest.mark.parametrize("way", ["uncompiled", "eager"])
@on_ranks(4)
def test_experts_on_a_mesh_of_fewer_ranks(mesh, way, placement):
    """Pairs of ranks have experts of their own; gradients are averaged over each pair."""
    both = mesh_of("cpu", (2, 2), mesh_dim_names=("ep", "efsdp"))
    theirs = sharded(torch_fully_shard, mesh, both["efsdp"], placement)
    ours = sharded(shardc.fully_shard, mesh, both["efsdp"], placement)
    if way == "eager":
        ours.compile(backend="shardc", options={"executor": "eager"})
    for step in range(2):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(7 * step + dist.get_rank()))
        for model in (theirs, ours):
            model(x).square().mean().backward()
            if step == 0:
                model.zero_grad()
    for (name, q), p in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert p.device_mesh == q.device_mesh
        assert q.grad.full_tensor().any()
        torch.testing.assert_close(p.grad.full_tensor(), q.grad.full_tensor(), msg=name)
    experts = [each for each in ours.modules() if isinstance(each, Experts)]
    assert [len(each._shardc_unit.buckets) for each in experts] == [1, 1]


@on_ranks(4)
def test_settings_of_a_block_reach_its_experts(mesh):
    """As FSDP2's, whose groups of a block have the block's settings."""
    both = mesh_of("cpu", (2, 2), mesh_dim_names=("ep", "efsdp"))
    models = [
        sharded(shard, mesh, both["efsdp"], reshard_after_forward=False)
        for shard in (torch_fully_shard, shardc.fully_shard)
    ]
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    for model in models:
        for block in model:
            block.set_gradient_divide_factor(1.0)
            block.set_force_sum_reduction_for_comms(True)
        model[0].set_requires_gradient_sync(False)
        model(x).square().mean().backward()
        model[0].set_requires_gradient_sync(True)
        model(x).square().mean().backward()
    for (name, q), p in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad.full_tensor(), msg=name)


@on_ranks(4)
def test_methods_of_a_block_and_of_its_copy_reach_its_experts(mesh):
    """Methods without `recurse` do; a list of units to prefetch contains the experts, too."""
    both = mesh_of("cpu", (2, 2), mesh_dim_names=("ep", "efsdp"))
    model = sharded(shardc.fully_shard, mesh, both["efsdp"])
    for block, other in (model, copy.deepcopy(model)):
        experts = block.moe.experts._shardc_unit
        block.unshard()
        assert all(bucket.gathered.opened for bucket in experts.buckets)
        block.reshard()
        assert not any(bucket.gathered.opened for bucket in experts.buckets)
        block.set_gradient_divide_factor(3.0)
        assert experts.settings.divide_factor == 3
        assert other.moe.experts._shardc_unit.settings.divide_factor is None
        other.set_modules_to_forward_prefetch([block])
        assert other._shardc_unit.settings.forward_prefetch == (block._shardc_unit, experts)


@on_ranks(4)
def test_a_module_with_parameters_of_two_meshes_is_refused(mesh):
    both = mesh_of("cpu", (2, 2), mesh_dim_names=("ep", "efsdp"))
    info = common.FSDPMeshInfo(both["efsdp"], shard_mesh_dim=0)
    model = Block()

    def one(param):
        on_it = param is model.moe.experts.up
        return common.ShardPlacementResult(None, info) if on_it else None

    def every(param):
        return common.ShardPlacementResult(None, info)

    for target, place, words in (
        (model, one, "'moe.experts.up' on .*, but Experts, which holds it, is a unit on"),
        (model.dense, every, "'weight' on .*call fully_shard on it with that mesh"),
    ):
        with pytest.raises(ValueError, match=words):
            shardc.fully_shard(target, mesh=mesh, shard_placement_fn=place)
    assert not any(isinstance(each, shardc.ShardedModule) for each in model.modules())
