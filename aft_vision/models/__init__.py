"""Models built on the AFT blocks."""

from aft_vision.models.aft_vit import AFTVisionTransformer
from aft_vision.models.autoregressive import AFTDecoder, bits
from aft_vision.models.decoder_state import DecoderState
from aft_vision.models.decoders import create_decoder, load_decoder, save_decoder
from aft_vision.models.pixel import PixelDecoder, half_mask, images_to_tokens, tokens_to_images
from aft_vision.models.sampling import Sampler, filter_logits
from aft_vision.models.sampling_run import run_batches
