"""Models built on the AFT blocks."""

from aft_vision.models.aft_vit import AFTVisionTransformer
