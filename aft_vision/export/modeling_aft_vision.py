"""AFT vision transformers for transformers' Auto classes, where this package is not installed.

`aft_vision.inline` makes one file of it.
"""

from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.image_utils import SizeDict
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

from aft_vision.export.network import Architecture, Network


class AFTVisionConfig(PretrainedConfig):
    """The configuration of a folder that timm opens too.

    Args:
        network: arguments of `Architecture`.
    """

    model_type = 'aft_vision'
    network: dict[str, Any] | None = None

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read config.json, with the names of its classes where transformers has them."""
        config, unused = super().get_config_dict(*args, **kwargs)
        if 'pretrained_cfg' in config:
            names = config.get('label_names') or config['pretrained_cfg'].get('label_names')
            names = names or [f'LABEL_{index}' for index in range(config['num_classes'])]
            config = {
                'model_type': cls.model_type,
                'architectures': ['AFTVisionForImageClassification'],
                'id2label': dict(enumerate(names)),
                'label2id': {name: index for index, name in enumerate(names)},
                **{name: config[name] for name in ('auto_map', 'network', 'problem_type') if name in config},
            }
        return config, unused

    def create_network(self, num_classes: int) -> Network:
        """Build the network, without its weights.

        Raises:
            ValueError: the configuration has no network.
        """
        if self.network is None:
            raise ValueError('expected a config with `network`, as aft_vision.export writes it, got one without')
        return Network(Architecture(**self.network), num_classes)


class AFTVisionImageProcessor(BitImageProcessorPil):
    """timm's evaluation transform: Bit's, but a crop between two pixels starts at the even one."""

    def center_crop(  # type: ignore[override]
        self, image: np.ndarray, size: SizeDict, **kwargs: Any
    ) -> np.ndarray:
        """Crop the centre of an image (channels, H, W); a smaller one is padded with zeros."""
        top, left = round((image.shape[1] - size.height) / 2), round((image.shape[2] - size.width) / 2)
        if min(top, left) < 0:
            return super().center_crop(image, size, **kwargs)
        return image[:, top : top + size.height, left : left + size.width]


class AFTVisionPreTrainedModel(PreTrainedModel):
    """Base of the models: weights under the names of timm."""

    config_class = AFTVisionConfig
    # Weights without this prefix, as timm has them, are found too.
    base_model_prefix = 'network'
    main_input_name = 'pixel_values'
    _no_split_modules = ['Block']  # noqa: RUF012

    def _init_weights(self, module: nn.Module) -> None:
        # Only for a new classifier: all other weights are loaded.
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class AFTVisionModel(AFTVisionPreTrainedModel):
    """The features of images."""

    _keys_to_ignore_on_load_unexpected = [r'(^|\.)head\.']  # noqa: RUF012

    def __init__(self, config: AFTVisionConfig) -> None:
        super().__init__(config)
        self.network = config.create_network(num_classes=0)
        self.post_init()

    def forward(
        self, pixel_values: Tensor, attn_mask: Tensor | None = None, return_dict: bool | None = None
    ) -> BaseModelOutputWithPooling | tuple[Tensor, ...]:
        """Compute tokens (B, T, C) after the final norm, and the input of the classifier, (B, C).

        Args:
            pixel_values: (B, channels, H, W).
            attn_mask: (B, tokens) or (B, H / patch, W / patch) bool, True where a patch counts.
        """
        tokens = self.network.forward_features(pixel_values, attn_mask)
        pooled = self.network.pool(tokens, attn_mask)
        output = BaseModelOutputWithPooling(last_hidden_state=tokens, pooler_output=pooled)
        return output.to_tuple() if return_dict is False else output


class AFTVisionForImageClassification(AFTVisionPreTrainedModel):
    """A classifier of images."""

    def __init__(self, config: AFTVisionConfig) -> None:
        super().__init__(config)
        self.network = config.create_network(num_classes=len(config.id2label or {}))
        self.post_init()

    def forward(
        self,
        pixel_values: Tensor,
        attn_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> ImageClassifierOutput | tuple[Tensor, ...]:
        """Compute logits (B, classes), and with labels the loss of transformers for `config.problem_type`.

        Args:
            pixel_values: (B, channels, H, W).
            attn_mask: (B, tokens) or (B, H / patch, W / patch) bool, True where a patch counts.
            labels: (B,) indices of classes for 'single_label_classification'; (B, classes) of 0. and 1. for
                'multi_label_classification', or numbers for 'regression'. If `problem_type` is None, one output means
                regression, and otherwise the data type of the labels decides: integers are single labels.
        """
        logits = self.network(pixel_values, attn_mask)
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        output = ImageClassifierOutput(loss=loss, logits=logits)
        return output.to_tuple() if return_dict is False else output
