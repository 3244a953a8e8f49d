"""Captures of the launches of a CUDA device."""

import torch


def is_capturing(device: torch.device | None = None) -> bool:
    """Return whether launches on a CUDA device, by default the current one, are recorded in a CUDA graph.

    During a capture nothing may be timed or read back.
    """
    if not torch.cuda.is_initialized():
        return False
    # torch checks the stream of the current device.
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
