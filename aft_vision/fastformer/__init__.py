from .config import PRESETS, FastformerConfig, Preset

__all__ = ['PRESETS', 'FastformerConfig', 'Preset']
