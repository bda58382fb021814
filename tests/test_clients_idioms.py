"""Idioms of codebases that cannot run here whole, by FSDP2 and by shardc."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import Stack, seeded
from ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import distribute_tensor

import shardc

BOTH = pytest.mark.parametrize("shard", [torch_fully_shard, shardc.fully_shard])
TOKENS = torch.arange(12).view(2, 6) % 31


def dino_sharded(shard, model, mesh):
    """A backbone as dinov3 (6876159) shards it: each block, prefetch both ways, then the root."""
    for block in model.layers:
        shard(block, mesh=mesh, reshard_after_forward=True)
    for before, after in zip(model.layers, model.layers[1:], strict=False):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    shard(model, mesh=mesh, reshard_after_forward=True)
    return model


@BOTH
@on_ranks(2)
def test_dinov3_teacher_reshards_after_its_forward(mesh, shard):
    """dinov3 reads the private setting before the lazy init, and writes it back after."""
    teacher = dino_sharded(shard, seeded(Stack).requires_grad_(False), mesh)
    state = teacher._get_fsdp_state()
    kept = state._fsdp_param_group.post_forward_mesh_info
    assert kept
    state._lazy_init()
    state._fsdp_param_group.post_forward_mesh_info = kept
    with torch.no_grad():
        teacher(TOKENS)
    assert state._fsdp_param_group.post_forward_mesh_info == kept
    state._fsdp_param_group.post_forward_mesh_info = None
    assert state._fsdp_param_group.post_forward_mesh_info is None
    assert teacher.layers[0]._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info
    if shard is shardc.fully_shard:
        assert teacher._shardc_unit.settings.reshard_after_forward is False


@BOTH
@on_ranks(2)
def test_dinov3_teacher_is_a_mean_of_students(mesh, shard):
    """dinov3: models made by `to_empty`, the teacher loads the student, then follows it."""
    plain = seeded(Stack)
    with torch.device("meta"):
        student, teacher = Stack(), Stack().requires_grad_(False)
    for model in (student, teacher):
        dino_sharded(shard, model, mesh)
        model.to_empty(device="cpu")
    whole = {
        name: distribute_tensor(value, mesh, src_data_rank=None)
        for name, value in plain.state_dict().items()
    }
    student.load_state_dict(whole)
    teacher.load_state_dict(student.state_dict())
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.1)
    pairs = [list(model.parameters()) for model in (student, teacher)]
    for _ in range(2):
        student(TOKENS, TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_mul_(pairs[1], 0.9)
            torch._foreach_add_(pairs[1], pairs[0], alpha=1 - 0.9)

    alone, wanted = copy.deepcopy(plain), copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
    for _ in range(2):
        alone(TOKENS, TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()
        for mean, value in zip(wanted.parameters(), alone.parameters(), strict=True):
            mean.data.mul_(0.9).add_(value.data, alpha=1 - 0.9)
    for found, value, start in zip(
        teacher.parameters(), wanted.parameters(), plain.parameters(), strict=True
    ):
        assert not torch.equal(value, start)
        torch.testing.assert_close(found.full_tensor(), value)


@BOTH
@on_ranks(2)
def test_dinov3_saves_a_dict_of_models(mesh, shard, tmp_path):
    """dinov3: student and teacher in one `ModuleDict`, whose parts are sharded, by DCP."""

    def build(seed):
        torch.manual_seed(seed)
        both = nn.ModuleDict({"student": Stack(), "teacher": Stack().requires_grad_(False)})
        for model in both.values():
            dino_sharded(shard, model, mesh)
        return both

    saved, loaded = build(0), build(1)
    dcp.save({"model": _state_of(shard, saved)[0](saved)}, checkpoint_id=tmp_path)
    values = {"model": _state_of(shard, loaded)[0](loaded)}
    dcp.load(values, checkpoint_id=tmp_path)
    _state_of(shard, loaded)[1](loaded, values["model"])
    for left, right in zip(saved.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(left.full_tensor(), right.full_tensor())


def _state_of(shard, model):
    """The functions for state dicts, as `SHARDC_AS_FSDP2=1` binds them."""
    if shard is torch_fully_shard:
        return get_model_state_dict, set_model_state_dict
    return shardc.get_model_state_dict, shardc.set_model_state_dict
