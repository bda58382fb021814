"""`load_pretrained`: safetensors straight into segments, each element read once."""

import pytest
import torch
import torch.distributed as dist
from models import Stack, full, on_meta, seeded
from ranks import on_ranks
from real_models import gpt2, llama
from safetensors.torch import save_file

import shardc.state.pretrained as pretrained
from shardc import ShardTensor, fully_shard, load_pretrained


def on_first(mesh, write) -> None:
    if mesh.get_rank() == 0:
        write()
    dist.barrier()


@pytest.mark.parametrize(("build", "shard_size"), [(gpt2, "1GB"), (llama, "20KB")])
@on_ranks(2)
def test_a_model_on_meta_reads_its_part_only(mesh, build, shard_size, tmp_path):
    plain = seeded(build, 5).eval()
    on_first(mesh, lambda: plain.save_pretrained(tmp_path, max_shard_size=shard_size))
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size != "1GB")
    model = fully_shard(on_meta(build), mesh=mesh, units="auto").eval()
    sizes, read = [], pretrained.read_box

    def counting(*args):
        sizes.append((value := read(*args)).numel())
        return value

    pretrained.read_box = counting
    try:
        keys = load_pretrained(model, str(tmp_path))
    finally:
        pretrained.read_box = read
    assert keys == ([], [])
    params = list(model.parameters())
    assert sum(sizes) == sum(param.to_local().numel() for param in params)
    assert max(sizes) <= max(param.to_local().numel() for param in params)
    for (key, theirs), ours in zip(plain.named_parameters(), params, strict=True):
        assert isinstance(ours, ShardTensor) and torch.equal(full(ours), theirs), key
    for (key, theirs), (_, ours) in zip(plain.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), key
    tokens = torch.arange(8).view(1, 8)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, plain(tokens).logits)


@on_ranks(2)
def test_dtypes_are_converted_and_names_mapped(mesh, tmp_path):
    state = {f"old.{k}": v.bfloat16() for k, v in seeded(Stack, 5).state_dict().items()}
    on_first(mesh, lambda: save_file(state, f"{tmp_path}/other.safetensors"))
    model = fully_shard(seeded(Stack), mesh=mesh, units="auto")
    load_pretrained(
        model, tmp_path / "other.safetensors", rename=lambda name: name.removeprefix("old.")
    )
    for name, param in model.named_parameters():
        assert param.dtype == torch.float32
        assert torch.equal(full(param), state[f"old.{name}"].float()), name
    plain = seeded(Stack)
    load_pretrained(plain, f"{tmp_path}/other.safetensors", rename=lambda name: name[4:])
    assert torch.equal(plain.head.weight, state["old.head.weight"].float())


@on_ranks(2)
def test_names_and_shapes_that_differ_are_errors(mesh, tmp_path):
    state = seeded(Stack, 5).state_dict()
    state["more"] = state.pop("head.weight")
    on_first(mesh, lambda: save_file(state, f"{tmp_path}/model.safetensors"))
    model = fully_shard(seeded(Stack), mesh=mesh, units="auto")
    before = [param.to_local().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match=r"missing in the files: 'head\.weight'\n.*'more'"):
        load_pretrained(model, tmp_path)
    with pytest.raises(RuntimeError, match=r"size mismatch for 'embed\.weight': .*\(31, 20\)"):
        load_pretrained(fully_shard(Stack(dim=20), mesh=mesh), tmp_path, strict=False)
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors\.index\.json nor"):
        load_pretrained(model, f"{tmp_path}/none")
    mine = tmp_path if mesh.get_rank() == 0 else f"{tmp_path}/none"
    with pytest.raises((RuntimeError, FileNotFoundError), match=r"nothing was loaded|neither"):
        load_pretrained(model, mine, strict=False)
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.to_local(), value)
    keys = load_pretrained(model, tmp_path, strict=False)
    assert keys == (["head.weight"], ["more"])
    assert torch.equal(full(model.embed.weight), state["embed.weight"])


class Counted(torch.nn.Linear):
    """Has a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__(5, 5)
        self.register_buffer("scale", torch.full((5,), 3.0), persistent=False)


class Resets(Counted):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "scale"):
            self.scale.fill_(3.0)


class Nothing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(5, 5))
        self.register_buffer("scale", torch.ones(5), persistent=False)


@on_ranks(2)
def test_buffers_that_are_not_saved(mesh, tmp_path):
    plain = seeded(Resets, 5)
    on_first(mesh, lambda: save_file(plain.state_dict(), f"{tmp_path}/model.safetensors"))
    model = fully_shard(on_meta(Resets), mesh=mesh)
    load_pretrained(model, tmp_path)
    assert torch.equal(model.scale, plain.scale) and torch.equal(full(model.bias), plain.bias)
    with pytest.raises(ValueError, match=r"'scale' is on meta, .* Nothing has no reset_parameters"):
        load_pretrained(fully_shard(on_meta(Nothing), mesh=mesh), tmp_path, strict=False)
