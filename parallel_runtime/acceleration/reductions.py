"""How torch.compile's GPU kernels reduce over a row: a norm over a model's width reads it once."""

from __future__ import annotations

from typing import Any

from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

_LONGEST_ROW = 4096


class RowsAtOnce(InductorChoices):
    """Keeps a row of up to 4096 numbers in registers. torch.compile does so up to 1024, or 64 where it sees no inner
    dim, and reads longer ones once more for every pass; FLUX.1's have 3072. Wan 14B's, of 5120, do not fit there beside
    all that a kernel does with them: its norms with rotary embedding became six times slower."""

    @staticmethod
    def should_use_persistent_reduction(features: SIMDKernelFeatures, cooperative_reduction: bool) -> bool:
        """See InductorChoices."""
        if InductorChoices.should_use_persistent_reduction(features, cooperative_reduction):
            return True
        if cooperative_reduction or features.get_reduction_hint() not in (ReductionHint.INNER, ReductionHint.DEFAULT):
            return False
        sizes: Any = V.graph.sizevars
        return bool(sizes.statically_known_leq(features.reduction_numel, _LONGEST_ROW))
