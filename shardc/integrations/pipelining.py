"""`torch.distributed.pipelining` with sharded stages."""

from typing import Any

from torch.distributed.pipelining import PipelineStage

from shardc.runtime.modules.modules import ShardedModule


class ShardedStage(PipelineStage):
    """A `PipelineStage` whose gradients are reduced once a step, not once a micro-batch.

    The arguments are those of `PipelineStage`. `submodule` is sharded by `fully_shard`, and may be
    compiled. Until the last micro-batch a step holds the sum of unreduced gradients, as with FSDP2:
    more memory, fewer messages. A compiled stage that runs all forwards first (GPipe) reduces
    twice: the gradients of the last micro-batch, and the sum that waited. The stage needs a
    schedule that runs backwards in the order of forwards: all schedules of torch but DualPipeV.

    Some schedules split a backward in two (ZBV, interleaved zero bubble). The stage runs the whole
    backward in the place of the half for the inputs, because a compiled backward is one piece. The
    bubble that the half for the weights would fill stays.

    Raises:
        TypeError: `submodule` is not sharded.
    """

    submod: ShardedModule

    def __init__(self, submodule: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(submodule, ShardedModule):
            raise TypeError(
                f"ShardedStage: {type(submodule).__name__} is not sharded: call fully_shard on it "
                "first, or use PipelineStage"
            )
        super().__init__(submodule, *args, **kwargs)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a micro-batch, and decide whether a compiled backward reduces."""
        self._reduce_if_last(fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: Any = False,
    ) -> None:
        """Run the backward of a micro-batch, and decide whether an uncompiled backward reduces."""
        self._reduce_if_last(bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss, True, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Do nothing: `backward_one_chunk` ran the whole backward."""

    def _reduce_if_last(self, chunk: int) -> None:
        self.submod.set_requires_gradient_sync(self.chunks is None or chunk == self.chunks - 1)
