"""The earlier name of `tools.sample_pixels` for images that are completed, with the same options."""

import runpy

runpy.run_module('tools.sample_pixels', run_name='__main__', alter_sys=True)
