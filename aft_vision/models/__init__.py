"""Models built on the AFT blocks."""

from aft_vision.models.aft_pyramid import AFTPyramid
from aft_vision.models.aft_vit import AFTVisionTransformer
from aft_vision.models.decoder import AFTDecoder, bits
from aft_vision.models.decoders import create_decoder, load_decoder, save_decoder
from aft_vision.models.pixel import PixelDecoder, half_mask, images_to_tokens, tokens_to_images
from aft_vision.models.session import DecoderState, Session
