"""Trainer and SFTTrainer over sharded models: equal to one process, resumed, exported."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import full, on_meta, seeded
from ranks import on_ranks, run_on_ranks
from real_models import MODELS, gpt2, llama
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

from shardc import ShardedModule, ShardTensor, fully_shard
from shardc.integrations.transformers import ShardcTrainer, ShardcTrainerMixin

MODULE = "test_transformers"


def texts(count: int = 24, length: int = 9) -> list[dict[str, Any]]:
    """Token ids with labels, some of them not counted: batches have different numbers of tokens."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(61, (count, length), generator=generator)
    labels = rows.clone()
    for index, row in enumerate(labels):
        row[: index % 5] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(rows, labels, strict=True)]


def arguments(folder: str, batch: int, **kwargs: Any) -> TrainingArguments:
    asked = {"max_steps": 3, "logging_steps": 1, "learning_rate": 0.01, "warmup_steps": 2}
    asked |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    asked |= {"per_device_train_batch_size": batch, "per_device_eval_batch_size": batch}
    return TrainingArguments(folder, **(asked | {"max_grad_norm": 0.5} | kwargs))


def lora() -> Any:
    """GPT-2 with adapters."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", use_dora=True)
    return get_peft_model(gpt2(), config)


BUILDS = {"llama": llama, "gpt2": gpt2, "lora": lora}


def outcome(trainer: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Losses and norms as they were logged, and the parameters."""
    history = trainer.state.log_history
    seen = {key: [log[key] for log in history if key in log]
            for key in ("loss", "grad_norm", "learning_rate", "eval_loss")}  # fmt: skip
    return {**seen, "values": values, "clip": trainer.args.max_grad_norm}


def plain(mesh: Any, folder: str, build: str = "llama", **kwargs: Any) -> None:
    """One process: what Trainer does with batches of 4."""
    model = seeded(BUILDS[build])
    trainer = Trainer(model, arguments(folder, 4, **kwargs), train_dataset=texts(),
                      eval_dataset=texts(8))  # fmt: skip
    trainer.train()
    trainer.evaluate()
    torch.save(outcome(trainer, model.state_dict()), f"{folder}/plain.pt")


def sharded(mesh: Any, folder: str, build: str = "llama", **kwargs: Any) -> None:
    """Two ranks, batches of 2 each; equal to `plain`."""
    model = seeded(BUILDS[build])
    trainer = ShardcTrainer(
        model, arguments(folder, 4 // mesh.size(), **kwargs), train_dataset=texts(),
        eval_dataset=texts(8), sharding={"mesh": mesh},
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    assert all(isinstance(param, ShardTensor) for param in model.parameters())
    values = {name: full(value) for name, value in model.state_dict().items()}
    assert_equal(outcome(trainer, values), torch.load(f"{folder}/plain.pt"))
    if build == "lora":
        exports_adapters(mesh, trainer, f"{folder}/adapters")


def exports_adapters(mesh: Any, trainer: Any, folder: str) -> None:
    """Only the adapters are gathered; peft reads them, and training resumes from a checkpoint."""
    from peft import PeftModel

    trainer.save_model(folder)
    dist.barrier()
    assert not Path(folder, "model.safetensors").exists()
    read = PeftModel.from_pretrained(seeded(gpt2), folder)
    trained = {name: full(p) for name, p in trainer.model.named_parameters() if p.requires_grad}
    for name, value in trained.items():
        assert torch.equal(read.get_parameter(name), value), name
    args = arguments(f"{folder}/run", 2, save_strategy="steps", save_steps=2, max_grad_norm=0.01)
    kwargs = {"train_dataset": texts(), "sharding": {"mesh": mesh}}
    ShardcTrainer(seeded(lora), args, **kwargs).train()
    other = ShardcTrainer(seeded(lora), args, **kwargs)
    other.train(resume_from_checkpoint=f"{folder}/run/checkpoint-2")
    for name, param in other.model.named_parameters():
        if param.requires_grad:
            torch.testing.assert_close(full(param), trained[name], rtol=1e-5, atol=1e-6)


def assert_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert len(theirs["loss"]) == 3 and all(norm > theirs["clip"] for norm in theirs["grad_norm"])
    for key in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-4, atol=1e-5, msg=key)
    assert ours["values"].keys() == theirs["values"].keys()
    for name, value in theirs["values"].items():
        torch.testing.assert_close(ours["values"][name], value, rtol=1e-3, atol=2e-5, msg=name)


def both(folder: Path, **kwargs: Any) -> None:
    run_on_ranks(1, MODULE, "plain", {"folder": str(folder), **kwargs})
    run_on_ranks(2, MODULE, "sharded", {"folder": str(folder), **kwargs})


def test_trains_as_one_process(tmp_path: Path) -> None:
    """Accumulating; compiled: see test_integrations."""
    both(tmp_path, gradient_accumulation_steps=2)


@on_ranks(2)
def test_a_plain_trainer_names_the_way_out(mesh, tmp_path):
    model = fully_shard(seeded(llama), mesh=mesh, units="auto")
    trainer = Trainer(model, arguments(str(tmp_path), 2), train_dataset=texts())
    with pytest.raises(RuntimeError, match=r"shardc\.integrations\.transformers\.ShardcTrainer"):
        trainer.train()


def test_activation_checkpointing_and_tied_weights(tmp_path: Path) -> None:
    both(tmp_path, build="gpt2", gradient_checkpointing=True)


def test_adapters(tmp_path: Path) -> None:
    both(tmp_path, build="lora", max_grad_norm=0.01)


def sft(mesh: Any, folder: str, ours: bool) -> None:
    """TRL's trainer, with its own data preparation, loss and metrics."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    class ShardedSFTTrainer(ShardcTrainerMixin, SFTTrainer):
        pass

    words = {f"w{index}": index for index in range(59)} | {"<pad>": 59, "<eos>": 60}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="w0"
    )
    rows = [" ".join(f"w{x % 59}" for x in row["input_ids"].tolist()) for row in texts()]
    given = arguments(folder, 4 // mesh.size()).to_dict()
    keys = ("max_steps", "logging_steps", "learning_rate", "warmup_steps", "save_strategy")
    keys += ("report_to", "disable_tqdm", "use_cpu", "per_device_train_batch_size")
    args = SFTConfig(folder, **{key: given[key] for key in keys}, bf16=False, max_length=12,
                     max_grad_norm=0.5, gradient_checkpointing=True)  # fmt: skip
    kwargs = {"sharding": {"mesh": mesh}} if ours else {}
    model = seeded(llama)
    trainer = (ShardedSFTTrainer if ours else SFTTrainer)(
        model, args, train_dataset=Dataset.from_dict({"text": rows}), processing_class=tokenizer,
        **kwargs,
    )  # fmt: skip
    trainer.train()
    values = {name: full(value) for name, value in model.state_dict().items()}
    seen = outcome(trainer, values)
    seen["eval_loss"] = [log["mean_token_accuracy"] for log in trainer.state.log_history[:3]]
    if ours:
        assert all(isinstance(param, ShardTensor) for param in model.parameters())
        assert_equal(seen, torch.load(f"{folder}/plain.pt"))
    else:
        torch.save(seen, f"{folder}/plain.pt")


def test_a_trainer_of_trl(tmp_path: Path) -> None:
    for world in (1, 2):
        run_on_ranks(world, MODULE, "sft", {"folder": str(tmp_path), "ours": world == 2})


@pytest.mark.parametrize("optim", ["adagrad", "rmsprop", "adafactor"])
def test_optimizers(tmp_path: Path, optim: str) -> None:
    """Beside fused AdamW, which is the default, and SGD, which test_integrations has."""
    both(tmp_path, optim=optim)


# -- checkpoints ---------------------------------------------------------------------------------


def saving(mesh: Any, folder: str) -> None:
    """Four steps with a checkpoint after the second, and how that ended."""
    trainer = resumable(mesh, folder)
    trainer.train()
    trainer.save_model(f"{folder}/ended")


def resumable(mesh: Any, folder: str) -> ShardcTrainer:
    asked = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    args = arguments(folder, 4 // mesh.size(), **asked)
    return ShardcTrainer(seeded(gpt2, 7), args, train_dataset=texts(), sharding={"mesh": mesh})


def resuming(mesh: Any, folder: str, exact: bool = True) -> None:
    trainer = resumable(mesh, folder)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert trainer.state.global_step == 4
    assert sum("loss" in log for log in trainer.state.log_history) == 4
    ended = dict(gpt2().from_pretrained(f"{folder}/ended").named_parameters())
    begun = dict(gpt2().from_pretrained(f"{folder}/checkpoint-2").named_parameters())
    for name, param in trainer.model.named_parameters():
        assert not torch.equal(begun[name], ended[name]), name
        if exact and mesh.size() == 2:
            assert torch.equal(full(param), ended[name]), name
        else:
            torch.testing.assert_close(full(param), ended[name], rtol=1e-3, atol=2e-5)


def test_resumes(tmp_path: Path) -> None:
    """To the last bit at two ranks; at fewer and more within the order of reductions."""
    run_on_ranks(2, MODULE, "saving", {"folder": str(tmp_path)})
    kept = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    whole = {"model.safetensors", "config.json", "trainer_state.json", "scheduler.pt"}
    assert kept >= whole | {"shardc", "rng_state_0.pth", "rng_state_1.pth"}
    assert "optimizer.pt" not in kept
    for world in (2, 1, 4):
        run_on_ranks(world, MODULE, "resuming", {"folder": str(tmp_path)})


def unsharded(mesh: Any, folder: str) -> None:
    args = arguments(folder, 4, max_steps=4, save_strategy="steps", save_steps=2)
    trainer = Trainer(seeded(gpt2, 7), args, train_dataset=texts())
    trainer.train()
    trainer.save_model(f"{folder}/ended")


def going_on(mesh: Any, folder: str) -> None:
    """A checkpoint of one process; then one of our own without the whole model."""
    resuming(mesh, folder, exact=False)
    args = arguments(f"{folder}/parts", 2, save_strategy="steps", save_steps=2)
    kwargs = {"train_dataset": texts(), "sharding": {"mesh": mesh}, "whole_checkpoints": False}
    first = ShardcTrainer(seeded(gpt2, 7), args, **kwargs)
    first.train()
    assert not Path(f"{folder}/parts/checkpoint-2/model.safetensors").exists()
    model = on_meta(gpt2)
    second = ShardcTrainer(model, args, **kwargs)
    second.train(resume_from_checkpoint=f"{folder}/parts/checkpoint-2")
    for one, other in zip(first.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())


def test_resumes_an_unsharded_run(tmp_path: Path) -> None:
    run_on_ranks(1, MODULE, "unsharded", {"folder": str(tmp_path)})
    assert (tmp_path / "checkpoint-2" / "optimizer.pt").exists()
    run_on_ranks(2, MODULE, "going_on", {"folder": str(tmp_path)})


# -- what TrainingArguments say ------------------------------------------------------------------


@on_ranks(2)
def test_precision_of_the_arguments_is_a_policy(mesh, tmp_path):
    losses = []
    for dtype in (torch.bfloat16, torch.float32):
        args = arguments(str(tmp_path), 2, bf16=dtype == torch.bfloat16, max_steps=2)
        model, seen = seeded(llama), set()
        weights = model.model.layers[0].mlp.up_proj
        weights.register_forward_pre_hook(lambda each, _, seen=seen: seen.add(each.weight.dtype))
        trainer = ShardcTrainer(model, args, train_dataset=texts(), sharding={"mesh": mesh})
        trainer.train()
        assert seen == {dtype}
        assert {param.dtype for param in model.parameters()} == {torch.float32}
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    low, high = losses
    assert low != high
    torch.testing.assert_close(low, high, rtol=1e-2, atol=0.0)


@on_ranks(2)
def test_compiling_of_the_arguments_is_by_shardc(mesh, tmp_path):
    args = arguments(str(tmp_path), 2, torch_compile=True)
    trainer = ShardcTrainer(seeded(gpt2), args, train_dataset=texts(), sharding={"mesh": mesh})
    with mock.patch.object(ShardedModule, "compile") as compiles:
        trainer.train()
        trainer.evaluate(texts(4))
    compiles.assert_called_once()
    assert compiles.call_args.kwargs["backend"] == "shardc"


@on_ranks(2)
def test_a_model_on_meta_is_drawn_by_its_class(mesh, tmp_path):
    model = on_meta(llama)
    trainer = ShardcTrainer(
        model, arguments(str(tmp_path), 2), eval_dataset=texts(8), sharding={"mesh": mesh}
    )
    trainer.evaluate()
    plain = on_meta(llama).to_empty(device="cpu")
    torch.manual_seed(trainer.args.seed)
    plain.init_weights()
    for (name, param), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(full(param), theirs), name
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    assert trainer.state.log_history[0]["eval_loss"] < 10


@on_ranks(2)
def test_pushing_to_the_hub(mesh, tmp_path):
    """Rank 0 uploads a folder with the whole model."""
    args = arguments(str(tmp_path), 2, max_steps=1)
    trainer = ShardcTrainer(seeded(gpt2), args, train_dataset=texts(), sharding={"mesh": mesh})
    trainer.train()
    trainer.hub_model_id, uploads = "someone/model", []

    def upload(**kwargs: Any) -> None:
        uploads.append(sorted(path.name for path in Path(kwargs["folder_path"]).iterdir()))

    api = mock.MagicMock(**{"upload_folder.side_effect": upload})
    with mock.patch("transformers.trainer.hf_api", lambda *_, **__: api):
        trainer.push_to_hub(revision="main")
    assert len(uploads) == (mesh.get_rank() == 0)
    assert all({"model.safetensors", "README.md"} <= set(names) for names in uploads)


class Generating(ShardcTrainerMixin, Seq2SeqTrainer):
    """A mixin user that generates while it evaluates."""


@on_ranks(2)
def test_ranks_generate_in_step(mesh, tmp_path):
    """The texts of rank 0 end at once; it goes on gathering for rank 1."""
    model, plain = seeded(MODELS["t5"].build), seeded(MODELS["t5"].build)
    for each in (model, plain):
        each.generation_config.eos_token_id = 0
    rows = [{"input_ids": [7 * index + 2, 9 * index + 3, 5 * index], "labels": [5, 6]}
            for index in range(4)]  # fmt: skip
    want = plain.generate(torch.tensor([row["input_ids"] for row in rows]), max_length=9)
    assert want[:2, 1:].any() == 0 and want[3, -1] != 0
    args = Seq2SeqTrainingArguments(
        str(tmp_path), predict_with_generate=True, generation_max_length=9, use_cpu=True,
        per_device_eval_batch_size=2, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = Generating(model, args, sharding={"mesh": mesh})
    seen = torch.as_tensor(trainer.predict(rows).predictions)
    assert torch.equal(seen[:, :9], want) and not seen[:, 9:].any()  # what follows is padding
