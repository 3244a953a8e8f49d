"""The earlier name of `tools.sample_pixels` for images that are completed."""

raise SystemExit('error: tools.complete_images is tools.sample_pixels now, with the same arguments')
