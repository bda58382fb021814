"""torchtitan's `Trainer` on its debug model of DeepSeek-V3, with expert parallelism.

`apply_fsdp_to_decoder` puts the experts on a mesh of their own, by `shard_placement_fn`.
"""

import torchtitan_loop as loop
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.trainer import Trainer


def change(made: Trainer.Config) -> None:
    """Two ranks share the experts; checkpoints are those of DCP."""
    made.parallelism.expert_parallel_degree = 2
    made.checkpoint.last_save_model_only = made.checkpoint.last_save_in_hf = False


loop.DEBUG_MODEL, loop.change = deepseek_v3_debugmodel, change
loop.main()
