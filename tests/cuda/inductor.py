"""Imports what a rehearsal needs of Inductor, and asks for no GPU while doing so.

Inductor of torch 2.11 asks for one as it is imported. A process that has asked cannot be forked.
"""

from unittest import mock

with mock.patch("torch.cuda.is_available", return_value=True):
    import torch._inductor.codegen.cuda_combined_scheduling
    import torch._inductor.compile_fx
    import torch._inductor.fx_passes.fuse_attention
    import torch._inductor.select_algorithm  # noqa: F401
