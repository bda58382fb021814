"""transformers' `from_pretrained(..., distributed_config=)` under FSDP2's names, by shardc."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers.distributed.mixin as distributing
from models import seeded
from ranks import mesh_of, on_ranks
from real_models import llama, mixtral
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from transformers.distributed.utils import TransformersDeviceMesh

import shardc
from shardc import ShardTensor
from shardc.integrations import sharded_at_load

BATCH = torch.arange(12).view(2, 6)


def _meshes(asked: DistributedConfig) -> tuple[torch.device, TransformersDeviceMesh]:
    """The meshes that transformers would make for each load, made once (`mesh_of`)."""
    dense = (1, asked.dp_replicate_size, asked.fsdp_size, asked.tp_size)
    experts = (1, asked.dp_replicate_size, asked.efsdp_size, asked.ep_size)
    return torch.device("cpu"), TransformersDeviceMesh(
        mesh_of("cpu", dense, ("pp", "dp_replicate", "fsdp", "tp")),
        mesh_of("cpu", experts, ("pp", "dp_replicate", "efsdp", "ep")),
    )


def _loaded(cls: type[Any], folder: str, sizes: dict[str, int], **kwargs: Any) -> Any:
    asked = DistributedConfig(**sizes)
    with (
        mock.patch.object(distributing, "initialize_distributed_mesh", _meshes),
        shardc.as_fsdp2(),
    ):
        return cls.from_pretrained(folder, distributed_config=asked, **kwargs)


def _written(model: Any, folder: Any, **kwargs: Any) -> str:
    """The folder, with the model as `save_pretrained` writes it."""
    if dist.get_rank() == 0:
        model.save_pretrained(folder, **kwargs)
    dist.barrier()
    return str(folder)


def _whole(param: torch.Tensor) -> torch.Tensor:
    return param.full_tensor() if isinstance(param, DTensor) else param


CASES = {
    "rows are cut": (llama, {"fsdp_size": 2}),
    "tied": (lambda: llama(tie_word_embeddings=True), {"fsdp_size": 2}),
    "experts one by one in the file": (mixtral, {"fsdp_size": 2}),
    "copies": (llama, {"fsdp_size": 2, "dp_replicate_size": 2}),
    "tensor parallel": (llama, {"fsdp_size": 2, "tp_size": 2}),
    "experts on ranks of their own": (lambda: mixtral(4), {"fsdp_size": 4, "ep_size": 2}),
}


@pytest.mark.parametrize("case", [*CASES][:3])
@on_ranks(2)
def test_files_of_save_pretrained(mesh, case, tmp_path):
    _check(*CASES[case], tmp_path)


@pytest.mark.parametrize("case", [*CASES][3:])
@on_ranks(4)
def test_files_of_save_pretrained_on_several_dims(mesh, case, tmp_path):
    _check(*CASES[case], tmp_path)


def _check(build: Any, sizes: dict[str, int], folder: Any) -> None:
    """Values and gradients of the loaded model are those of the model that was saved."""
    plain = seeded(build, 5).eval()
    path = _written(plain, folder, max_shard_size="20KB")
    model = _loaded(type(plain), path, sizes)
    plain(input_ids=BATCH, labels=BATCH).loss.backward()
    model(input_ids=BATCH, labels=BATCH).loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(ours, ShardTensor), name
        assert torch.equal(_whole(ours), theirs), name
        torch.testing.assert_close(_whole(ours.grad), theirs.grad, msg=name)


class _Counted:
    """A slice of a file that counts the elements read."""

    def __init__(self, source: Any, counts: list[int]) -> None:
        self.source, self.counts = source, counts

    def __getitem__(self, place: Any) -> torch.Tensor:
        self.counts.append((read := self.source[place]).numel())
        return read


@on_ranks(2)
def test_each_rank_reads_its_part_only(mesh, tmp_path):
    plain, counts = seeded(llama, 5), []
    path, read = _written(plain, tmp_path), sharded_at_load.read_part

    def counting(param, source, *args):
        return read(param, _Counted(source, counts), *args)

    with mock.patch.object(sharded_at_load, "read_part", counting):
        model = _loaded(type(plain), path, {"fsdp_size": 2}, dtype=torch.bfloat16)
    assert sum(counts) == sum(param.to_local().numel() for param in model.parameters())
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(_whole(ours), theirs.bfloat16())


@on_ranks(2)
def test_values_that_the_files_lack_or_have_in_another_shape(mesh, tmp_path):
    """A file has half of the rows of a parameter: as many as a rank holds."""
    plain, name = seeded(llama, 5), "model.layers.1.mlp.up_proj.weight"
    state = plain.state_dict()
    state["lm_head.weight"] = state["lm_head.weight"][:30].clone()
    del state[name]
    path, sizes = _written(plain, tmp_path, state_dict=state), {"fsdp_size": 2}
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        _loaded(type(plain), path, sizes)
    model, found = _loaded(
        type(plain), path, sizes, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert set(found["missing_keys"]) == {name}
    assert {key for key, *_ in found["mismatched_keys"]} == {"lm_head.weight"}
    for (key, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        value = _whole(ours)
        assert torch.equal(value, theirs) == (key not in (name, "lm_head.weight")), key
        assert 0.01 < value.float().std() < 0.03 or value.ndim == 1, key  # drawn by transformers


@on_ranks(2)
def test_compiled_as_one_graph_and_generates_in_step(mesh, tmp_path):
    """transformers marks the model as FSDP's, which makes Dynamo break graphs, or skip guards."""
    plain = seeded(llama, 5).eval()
    path = _written(plain, tmp_path)
    model = _loaded(type(plain), path, {"fsdp_size": 2})
    counters.clear()
    model.compile(backend="shardc", options={"executor": "eager"})
    for each in (plain, model):
        each(input_ids=BATCH, labels=BATCH).loss.backward()
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(_whole(ours.grad), theirs.grad)
    model._compiled_call_impl = None
    rank = dist.get_rank()
    prompt = BATCH[rank : rank + 1]
    want = plain.generate(prompt, max_new_tokens=3 + 2 * rank, do_sample=False)
    assert torch.equal(model.generate(prompt, max_new_tokens=3 + 2 * rank, do_sample=False), want)
