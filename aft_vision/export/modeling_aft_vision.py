"""Run model.pt2 of this folder in transformers 5.24 or newer, without aft_vision and timm: an image classifier."""

from typing import Any

import torch
from torch.export.passes import move_to_device_pass
from transformers import BitImageProcessorPil, PreTrainedModel, TimmWrapperConfig
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.utils import cached_file

HUB = {'cache_dir', 'force_download', 'local_files_only', 'proxies', 'revision', 'subfolder', 'token'}
# Without a meaning here: what transformers always passes, and how it reads weights.
IGNORED = {
    '_from_auto',
    '_from_pipeline',
    'adapter_kwargs',
    'trust_remote_code',
    'low_cpu_mem_usage',
    'use_safetensors',
}
FIX = 'for all else, `import aft_vision` and load the folder without trust_remote_code'


class AFTVisionConfig(TimmWrapperConfig):
    """timm's config.json, with names of the classes where it has none."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        names = config_dict.get('label_names') or [f'LABEL_{i}' for i in range(config_dict['num_classes'])]
        return super().from_dict({**config_dict, 'label_names': names}, **kwargs)


class AFTVisionImageProcessor(BitImageProcessorPil):
    """timm's evaluation transform: Bit's, but a crop between two pixels starts at the even one."""

    def center_crop(self, image: Any, size: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        top, left = round((image.shape[1] - size.height) / 2), round((image.shape[2] - size.width) / 2)
        if min(top, left) < 0:
            return super().center_crop(image, size, **kwargs)
        return image[:, top : top + size.height, left : left + size.width]


class AFTVisionForImageClassification(PreTrainedModel):
    """The program of a folder; `from_pretrained` takes one device as `device_map`."""

    config_class, main_input_name = AFTVisionConfig, 'pixel_values'

    def __init__(self, config: AFTVisionConfig, program: torch.export.ExportedProgram) -> None:
        super().__init__(config)
        classes = program.graph.output_node().args[0][0].meta['val'].shape[-1]
        if config.num_labels != classes:
            raise ValueError(f'expected num_labels={classes}, as model.pt2 has, got {config.num_labels}; {FIX}')
        self.program, self.network, self.training = program, program.module().requires_grad_(False), False

    @classmethod
    def from_pretrained(cls: Any, folder: Any, config: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        dtype = str(kwargs.pop('dtype', None) or kwargs.pop('torch_dtype', None) or 'auto').replace('auto', 'float32')
        device = kwargs.pop('device_map', None)
        if device == 'auto':
            device = 'cuda' if torch.cuda.is_available() else 'cpu'
        if unknown := kwargs.keys() - HUB - IGNORED:
            raise ValueError(f'expected no {", ".join(sorted(unknown))} for model.pt2; {FIX}')
        where = {name: kwargs[name] for name in HUB & kwargs.keys()}
        config = AFTVisionConfig.from_pretrained(folder, **where) if config is None else config
        path: Any = cached_file(folder, 'model.pt2', **where)
        return cls(config, torch.export.load(path)).to(device, getattr(torch, dtype.removeprefix('torch.')))

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> ImageClassifierOutput:
        if torch.is_grad_enabled() and any(x.requires_grad for x in (pixel_values, *self.parameters())):
            raise RuntimeError(f'expected inference, got tensors that require gradients; {FIX}')
        pixel_values = pixel_values.float() if pixel_values.is_floating_point() else pixel_values
        device = pixel_values.device.type
        with torch.autocast(device if torch.amp.is_autocast_available(device) else 'cpu', enabled=False):
            logits = self.network(pixel_values)
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return ImageClassifierOutput(loss=loss, logits=logits)

    def train(self, mode: bool = True) -> 'AFTVisionForImageClassification':
        if mode:
            raise RuntimeError(f'expected inference, got train(); {FIX}')
        return self

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f'expected a copy of the folder, got save_pretrained(); {FIX}')

    def _apply(self, fn: Any, recurse: bool = True) -> 'AFTVisionForImageClassification':
        moved = fn(torch.zeros(1, device=self.device))
        if moved.dtype != torch.float32:
            raise ValueError(f'expected torch.float32, as model.pt2 has, got {moved.dtype}; {FIX}')
        if moved.device != self.device:
            self.program = move_to_device_pass(self.program, moved.device)
            self.network = self.program.module().requires_grad_(False)
        return self
