"""Fastformer as Hugging Face models: embeddings, an encoder, pooling and a head.

Importing `aft_vision.fastformer` registers them with the Auto classes.
"""

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling, SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from .additive import AdditivePooling, FastformerAttention
from .baselines import BaselineLayer
from .config import FastformerConfig
from .encoder import ENCODERS, as_mask, create_encoder, create_norm
from .initialization import draw_weights
from .interaction import Concat
from .standalone import SavesCode


class FastformerEmbeddings(nn.Module):
    """Token embeddings, projected to the hidden size, plus positions; normalised, with dropout."""

    def __init__(self, config: FastformerConfig) -> None:
        super().__init__()
        self.max_positions = config.max_position_embeddings
        self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_size, padding_idx=config.pad_token_id)
        same = config.embedding_size == config.hidden_size
        self.projection = nn.Identity() if same else nn.Linear(config.embedding_size, config.hidden_size)
        self.embed_positions = None
        if config.use_position_embeddings:
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.norm = create_norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, inputs_embeds: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Compute hidden states (B, N, C) of token embeddings (B, N, embedding_size).

        Args:
            inputs_embeds: rows of `embed_tokens`, or other embeddings.
            position_ids: (B, N) or (1, N); None: 0, 1, 2 and so on.

        Raises:
            ValueError: a text longer than the positions.
        """
        x = self.projection(inputs_embeds)
        if self.embed_positions is not None:
            x = x + self.embed_positions(_positions(x, position_ids, self.max_positions))
        return self.dropout(self.norm(x))


def _positions(x: Tensor, position_ids: Tensor | None, limit: int) -> Tensor:
    """Return the positions (N,) from the left, or those given, (B, N) or (1, N)."""
    if position_ids is not None:
        return position_ids
    if x.shape[1] > limit:
        raise ValueError(
            f'a text may have {limit} tokens (max_position_embeddings), got {x.shape[1]}: truncate it, raise '
            'max_position_embeddings, or use_position_embeddings=False'
        )
    return torch.arange(x.shape[1], device=x.device)


# What accelerate must not divide between devices: layers, and modules that add or multiply what their parts return.
NO_SPLIT = [
    BaselineLayer.__name__,
    *'FastformerEmbeddings FastformerLayer AdditivePooling DecoderEmbeddings FastformerDecoderLayer'.split(),
    *'UserEncoder ConversionHead'.split(),
]
# Arguments of `from_pretrained` about where a file lies.
HUB_ARGUMENTS = ('cache_dir', 'force_download', 'local_files_only', 'proxies', 'revision', 'subfolder', 'token')


class FastformerPreTrainedModel(SavesCode, PreTrainedModel):
    """Base of all Fastformer models: configuration, initial weights, gradient checkpointing."""

    config_class = FastformerConfig
    config: FastformerConfig
    base_model_prefix = 'model'
    main_input_name = 'input_ids'
    supports_gradient_checkpointing = True
    # Implementations of full attention, for the Transformer encoder.
    _supports_sdpa = True
    _no_split_modules = NO_SPLIT
    # Names of weights in a saved model with a decoder, as regular expressions, to those here; and in one without.
    _names_with_decoder: ClassVar[Mapping[str, str]] = {}
    _names_without_decoder: ClassVar[Mapping[str, str]] = {}

    def __init__(self, config: FastformerConfig) -> None:
        config.check()
        super().__init__(config)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *model_args: Any,
        config: Any = None,
        key_mapping: Mapping[str, str] | None = None,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Load a saved model, or the encoder of one with another head, with initial weights for the rest.

        Args:
            pretrained_model_name_or_path: A folder, or a name on the Hugging Face hub.
            model_args, config, key_mapping, output_loading_info, kwargs: As in transformers; kwargs may be fields of
                the config, such as decoder_layers. The model is saved under its own names, whatever key_mapping.

        Raises:
            ValueError: no weight of the file fits, apart from the pooling and the head.
        """
        decoder = _has_decoder(pretrained_model_name_or_path, config, kwargs)
        names = {**(cls._names_with_decoder if decoder else cls._names_without_decoder), **(key_mapping or {})}
        loaded: Any = super().from_pretrained(
            pretrained_model_name_or_path,
            *model_args,
            config=config,
            key_mapping=names or None,
            output_loading_info=True,
            **kwargs,
        )
        model, info = loaded
        if names:
            # transformers would save the model under the names that it was loaded from.
            model._weight_conversions = None
        _require_matching_weights(model, info['missing_keys'], pretrained_model_name_or_path)
        return (model, info) if output_loading_info else model

    def needed_classes(self) -> list[Any]:
        """Return the classes that are needed to load this, except a language model's."""
        return [type(self), type(self.config), ENCODERS[self.config.encoder_mixer]]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Linear) and self.config.initializer_range is None:
            draw_weights(module.weight, None, module.in_features, module.out_features)
        if isinstance(module, (FastformerAttention, Concat)):
            module.reset_parameters()


def _has_decoder(source: Any, config: Any, options: Mapping[str, Any]) -> bool:
    """Return True if the saved model has an encoder and a decoder."""
    if source is not None:
        try:
            fields, _ = PreTrainedConfig.get_config_dict(
                source, **{k: options[k] for k in HUB_ARGUMENTS if k in options}
            )
        except OSError:
            # The folder of an adapter has no configuration, and its base model has the same class.
            pass
        else:
            return bool(fields.get('is_encoder_decoder'))
    return bool(getattr(config, 'is_encoder_decoder', False))


def _require_matching_weights(model: PreTrainedModel, missing: Any, source: Any) -> None:
    base: Any = model.base_model
    prefix = '' if base is model else f'{model.base_model_prefix}.'
    # A folder of another model may have a pooling of the same names and sizes.
    names = {f'{prefix}{name}' for name in base.state_dict() if not name.startswith('pooling.')}
    names -= set(model.all_tied_weights_keys)
    if names and names <= set(missing):
        raise ValueError(
            f'expected weights of a {type(model).__name__} in {source}, got none that fit: load it with the class that '
            f'saved it, or give key_mapping; the first names expected are {", ".join(sorted(names)[:3])}'
        )


def with_decoder(config: FastformerConfig, is_encoder_decoder: bool) -> FastformerConfig:
    """Return the configuration of a model with or without a decoder: this one, or a changed copy."""
    if config.is_encoder_decoder != is_encoder_decoder:
        config = copy.deepcopy(config)
        config.is_encoder_decoder = is_encoder_decoder
    return config


class FastformerModel(FastformerPreTrainedModel):
    """Embeddings, the encoder of `config.encoder_mixer`, and additive pooling of a text to one vector.

    Args:
        config: configuration of the model.
        use_pooling: False: no pooling, and a `pooler_output` of None.
    """

    _names_with_decoder: ClassVar[Mapping[str, str]] = {r'^encoder\.(embeddings|encoder)\.': r'\1.'}

    def __init__(self, config: FastformerConfig, use_pooling: bool = True) -> None:
        # Without pooling it is the encoder of a model with a decoder, whose configuration it shares.
        super().__init__(with_decoder(config, False) if use_pooling else config)
        config = self.config
        self.embeddings = FastformerEmbeddings(config)
        self.encoder = create_encoder(config)
        self.pooling = AdditivePooling(config) if use_pooling else None
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> BaseModelOutputWithPooling:
        """Encode texts.

        Args:
            input_ids: (B, N)
            attention_mask: (B, N), 1 or True where a token counts; None: all do.
            token_type_ids: not used; tokenisers return them.
            position_ids: (B, N) or (1, N); None: from the left.
            inputs_embeds: (B, N, embedding_size), instead of input_ids.
            output_hidden_states: also return the states before, between and after the layers.
            output_attentions: also return the attention weights of each layer: of Fastformer a pair (alpha, beta),
                both (B, h, N).

        Returns:
            last_hidden_state (B, N, C), meaningless at padded tokens, and pooler_output (B, C), zero for a text without
            tokens.

        Raises:
            ValueError: both or neither of input_ids and inputs_embeds are given, or the mask has another shape.
        """
        inputs_embeds = self._embed(input_ids, attention_mask, inputs_embeds)
        mask = as_mask(attention_mask, inputs_embeds.shape[:2])
        if mask is not None:
            # A weight of zero times a value that is not finite would be NaN.
            inputs_embeds = inputs_embeds.masked_fill(~mask[..., None], 0.0)
        config = self.config
        encoded = self.encoder(
            self.embeddings(inputs_embeds, position_ids),
            mask,
            output_hidden_states=config.output_hidden_states if output_hidden_states is None else output_hidden_states,
            output_attentions=config.output_attentions if output_attentions is None else output_attentions,
        )
        return BaseModelOutputWithPooling(
            last_hidden_state=encoded.last_hidden_state,
            pooler_output=None if self.pooling is None else self.pooling(encoded.last_hidden_state, mask),
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )

    def _embed(self, input_ids: Tensor | None, attention_mask: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if input_ids is not None and inputs_embeds is None:
            if input_ids.shape[1]:
                self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
            return self.embeddings.embed_tokens(input_ids)
        if input_ids is None and inputs_embeds is not None:
            return inputs_embeds
        raise ValueError(
            f'expected either input_ids or inputs_embeds, got {"neither" if input_ids is None else "both"}'
        )


class FastformerForSequenceClassification(FastformerPreTrainedModel):
    """A linear layer on the pooled text: one label of several, several labels, or regression."""

    _names_with_decoder: ClassVar[Mapping[str, str]] = {r'^encoder\.(embeddings|encoder)\.': r'model.\1.'}

    def __init__(self, config: FastformerConfig) -> None:
        config = with_decoder(config, False)
        super().__init__(config)
        self.num_labels = len(config.id2label or {})
        self.model = FastformerModel(config)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> SequenceClassifierOutput:
        """Classify texts; takes the arguments of `FastformerModel`, and labels.

        Args:
            labels: (B,) or (B, 1) classes; (B, num_labels) numbers in [0, 1] or booleans for several labels; (B,) or
                (B, num_labels) numbers for regression. `config.problem_type` says which; where it is None it follows
                from num_labels and the labels' shape and dtype, and is set.

        Returns:
            logits (B, num_labels), and the loss where there are labels.

        Raises:
            ValueError: labels of another shape, or of an empty batch, which has no mean loss.
        """
        encoded = self.model(
            input_ids,
            attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        logits = self.classifier(encoded.pooler_output)
        loss = None if labels is None else self._loss(logits, labels)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=encoded.hidden_states, attentions=encoded.attentions
        )

    def _loss(self, logits: Tensor, labels: Tensor) -> Any:
        config: Any = self.config
        if config.problem_type is None:
            several = labels.is_floating_point() or labels.shape == logits.shape
            chosen = 'multi_label_classification' if several else 'single_label_classification'
            config.problem_type = 'regression' if self.num_labels == 1 else chosen
        single = config.problem_type == 'single_label_classification'
        labels = labels.to(torch.long if single else logits.dtype)
        return self.loss_function(labels=labels, pooled_logits=logits, config=config)
