"""The error of a lost device."""

import torch


class _LostDeviceError(RuntimeError):
    pass


# torch before 2.8 raises a plain RuntimeError, which may be any other error too.
AcceleratorError: type[RuntimeError] = getattr(torch, 'AcceleratorError', _LostDeviceError)
