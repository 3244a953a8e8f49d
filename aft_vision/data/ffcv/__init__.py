"""FFCV files (.beton): the only place that imports ffcv."""
