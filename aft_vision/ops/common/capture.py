"""CUDA graphs: whether one is being captured."""

import torch


def is_capturing(device: torch.device | None = None) -> bool:
    """Return whether launches on a CUDA device, or on the current one, are recorded in a CUDA graph.

    Nothing may be timed or read back then.
    """
    if not torch.cuda.is_initialized():
        return False
    # The stream that is asked is that of the current device.
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
