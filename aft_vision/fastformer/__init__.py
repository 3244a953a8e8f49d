# Registers its encoders.
from . import baselines
from .config import PRESETS, FastformerConfig, Preset

__all__ = ['PRESETS', 'FastformerConfig', 'Preset']
