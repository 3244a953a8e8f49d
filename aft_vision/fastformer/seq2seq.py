"""Fastformer for text generation: an encoder, a decoder and a head over the vocabulary (Fastformer Table 6).

`generate` comes from transformers: greedy, beams, sampling.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.loss.loss_utils import fixed_cross_entropy
from transformers.modeling_outputs import ModelOutput, Seq2SeqLMOutput
from transformers.models.bart.modeling_bart import shift_tokens_right
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple

from .cache import FastformerCache
from .config import FastformerConfig
from .decoder import FastformerDecoder
from .modeling import FastformerModel, FastformerPreTrainedModel, with_decoder

# The label of a token without a loss, in torch and in transformers.
IGNORED = -100


class FastformerForConditionalGeneration(FastformerPreTrainedModel, GenerationMixin):
    """Any encoder, a causal Fastformer decoder that reads it, and the vocabulary's logits.

    Encoder and decoder share the token embeddings, and the head does where `config.tie_word_embeddings`: then a linear
    layer takes the hidden size to the embedding's, where the two differ. The switches `use_residual`, `use_layer_norm`,
    `use_ffn` and `use_position_embeddings` are for the encoder: the decoder has all four.

    A cache takes the tokens of each call in place, with use_cache=False too, as in transformers' models: go on twice
    from a `copy.deepcopy` of it. Padding after a target needs no mask.
    """

    _tied_weights_keys = {'lm_head.weight': 'encoder.embeddings.embed_tokens.weight'}  # noqa: RUF012
    # Names of a classifier and of a `FastformerModel`: no name becomes one that another pattern takes.
    _names_without_decoder: ClassVar[Mapping[str, str]] = {
        r'^(?:model\.)?(embeddings|encoder)\.': r'encoder.\1.',
    }
    # The parts of a classifier and a `FastformerModel` after their encoder.
    _keys_to_ignore_on_load_unexpected = [r'^(model\.)?pooling\.', r'^classifier\.']  # noqa: RUF012
    # The state cannot drop its last tokens, so `generate` supports no assistant model.
    _is_stateful = True
    # `Trainer` then divides by the labels of a whole update, however many batches it has.
    accepts_loss_kwargs = True

    def __init__(self, config: FastformerConfig) -> None:
        config = with_decoder(config, True)
        super().__init__(config)
        self.encoder = FastformerModel(config, use_pooling=False)
        self.decoder = FastformerDecoder(config)
        width = config.embedding_size if config.tie_word_embeddings else config.hidden_size
        same = width == config.hidden_size
        self.output_projection = nn.Identity() if same else nn.Linear(config.hidden_size, width)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embeddings of encoder and decoder."""
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embeddings."""
        self.encoder.set_input_embeddings(value)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Shift the labels (B, N) to the right, after the start token; labels without a loss become padding."""
        config: Any = self.config
        return shift_tokens_right(labels, config.pad_token_id, config.decoder_start_token_id)

    @can_return_tuple
    @deprecate_kwarg('past_key_values', '5.40.0', new_name='cache')
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: ModelOutput | tuple[Tensor, ...] | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Seq2SeqLMOutput:
        """Predict each next token of the target.

        Masks are 1 or True where a token counts; None where all do.

        Args:
            input_ids, attention_mask, inputs_embeds: (B, S) source, or (B, S, embedding_size) in its place.
            token_type_ids: Not used; tokenisers return them.
            decoder_input_ids, decoder_inputs_embeds: (B, N) target from its start token; None: the labels, shifted.
            decoder_attention_mask: (B, P + N), P tokens being in the cache.
            encoder_outputs: Output of `encoder`, instead of the source.
            cache: Tokens so far, without labels; the tokens of this call are added in place.
            labels: (B, N), the token after each of decoder_input_ids; -100 where there is no loss.
            use_cache: Return the cache; None: `config.use_cache`, outside training.
            output_hidden_states: Also return the states before, between and after the layers.
            output_attentions: Also return the encoder's weights. The decoder has none to return.
            num_items_in_batch: Divides the sum of the losses; None: the number of labels that have one.

        Raises:
            ValueError: no target, labels with a cache, a mask of another shape, a text too long.
        """
        if labels is not None and cache is not None:
            raise ValueError('expected a cache or labels, which are of a whole target, got both')
        hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if encoder_outputs is None and not (isinstance(cache, FastformerCache) and cache.is_updated):
            more = dict(inputs_embeds=inputs_embeds, output_hidden_states=hidden, output_attentions=output_attentions)
            encoder_outputs = self.encoder(input_ids, attention_mask, return_dict=True, **more)
        source = None if encoder_outputs is None else encoder_outputs[0]
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        cache = _as_cache(cache) if cache is not None or (use_cache and labels is None) else None
        target = self._embed_target(decoder_input_ids, decoder_inputs_embeds, labels)
        decoded = self.decoder(target, decoder_attention_mask, source, attention_mask, cache, hidden)
        logits = self.lm_head(self.output_projection(decoded.last_hidden_state))
        return Seq2SeqLMOutput(
            loss=None if labels is None else _loss(logits, labels, num_items_in_batch),
            logits=logits,
            cache=decoded.cache if use_cache else None,
            decoder_hidden_states=decoded.hidden_states,
            encoder_last_hidden_state=source,
            encoder_hidden_states=getattr(encoder_outputs, 'hidden_states', None),
            encoder_attentions=getattr(encoder_outputs, 'attentions', None),
        )

    def _embed_target(self, ids: Tensor | None, embeds: Tensor | None, labels: Tensor | None) -> Tensor:
        """Return the embeddings (B, N, embedding_size) of the target."""
        if ids is not None and embeds is not None:
            raise ValueError('expected decoder_input_ids or decoder_inputs_embeds, got both')
        if embeds is not None:
            return embeds
        if ids is None:
            if labels is None:
                raise ValueError('expected decoder_input_ids, decoder_inputs_embeds or labels, got none of them')
            ids = self.prepare_decoder_input_ids_from_labels(labels)
        return self.get_input_embeddings()(ids)


def _loss(logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    """Compute the cross-entropy of the tokens with a label, in at least float32."""
    logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    count = torch.tensor(num_items_in_batch) if isinstance(num_items_in_batch, int) else num_items_in_batch
    return fixed_cross_entropy(logits, labels.flatten().to(logits.device), count, IGNORED)


def _as_cache(past: Any) -> FastformerCache:
    """Return the cache to update: a new one if there is none, or only an empty one of another type, from `generate`.

    Raises:
        ValueError: a cache of another kind that holds something, or one of a fixed length.
    """
    if isinstance(past, FastformerCache):
        return past
    if past is None or (past.get_seq_length() == 0 and not past.is_compileable):
        return FastformerCache()
    raise ValueError(f'cache must be a FastformerCache or None, got {past!r}; leave cache_implementation as it is')
