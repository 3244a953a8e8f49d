"""Modules: the AFT token mixers, their position biases, and the patch embedding and the block around them."""

from aft_vision.layers.base import TokenMixer, aft_mixers, create_mixer, mixers_of, register_mixer, token_mixers
from aft_vision.layers.block import AFTBlock, AFTPatchEmbed, fix_trained_size
from aft_vision.layers.causal import CausalAttention, CausalBlock, CausalFull, CausalLocal, CausalMixer, CausalSimple
from aft_vision.layers.mixers import (
    AFTAxial,
    AFTConv,
    AFTFull,
    AFTLocal,
    AFTMixer,
    AFTOnehot,
    AFTSimple,
    GridMixer,
    PairMixer,
)
from aft_vision.layers.position_bias import AxisBias, FactorizedBias, PairwiseBias, StandardizedKernel
