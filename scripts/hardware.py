"""What the machine can do."""

import torch


def has_fast_bf16() -> bool:
    """Whether matrix products in bf16 are done in hardware here; where they are, training takes half the time."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()
