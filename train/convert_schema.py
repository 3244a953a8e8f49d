"""The experiment of a conversion: an image classifier's, and the section `convert`."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from aft_vision.data.ranges import check_ranges, within
from train.schema import Config, DistillConfig, RegularizeConfig, peak_rate, require, require_default

STAGES = ('blocks', 'features', 'labels')
# Keys of `distill` that every conversion may have.
TEACHER_KEYS = ('teacher', 'teacher_args')


@dataclass(frozen=True)
class ConvertSection:
    """The stages of a conversion; `distill.teacher` is the ViT that is converted.

    Attributes:
        keep: Last blocks that keep softmax attention, besides those that `model.attention_blocks` names.
        blocks_epochs: Passes over the images in which each block learns the output of the teacher's, without labels;
            0 leaves this stage out.
        blocks_lr: Its learning rate per 512 images.
        features_epochs: Passes in which the model learns the teacher's last features, without labels; 0 leaves this
            stage out.
        features_lr: Its learning rate per 512 images.
        fine_tune: The last stage, by the sections optim and schedule: from the labels (`labels`), from labels and
            teacher by the section distill (`distill`), or `none`.
    """

    keep: int = within('[0, inf)', 0, 'blocks')
    blocks_epochs: int = within('[0, inf)', 1, 'epochs')
    blocks_lr: float = within('(0, 1e4]', 4e-3)
    features_epochs: int = within('[0, inf)', 1, 'epochs')
    features_lr: float = within('(0, 1e4]', 1e-3)
    fine_tune: Literal['labels', 'distill', 'none'] = 'labels'

    def __post_init__(self) -> None:
        check_ranges(self, 'convert')
        some = bool(self.blocks_epochs or self.features_epochs) or self.fine_tune != 'none'
        require('convert.fine_tune', self.fine_tune, some, 'labels or distill if no other stage has epochs')


@dataclass(frozen=True)
class ConvertConfig(Config):
    """One conversion of a pretrained ViT to an AFT model."""

    convert: ConvertSection = field(default_factory=ConvertSection)

    def __post_init__(self) -> None:
        super().__post_init__()
        teacher = self.distill.teacher
        require('distill.teacher', teacher, teacher is not None, 'the ViT to convert')
        require_default(self.run, 'run.init_from', 'as a conversion starts from distill.teacher')
        if self.convert.fine_tune != 'distill':
            others = (each.name for each in dataclasses.fields(DistillConfig) if each.name not in TEACHER_KEYS)
            require_default(self.distill, *(f'distill.{name}' for name in others), 'without convert.fine_tune=distill')
        kind = self.distill.kind
        require('distill.kind', kind, kind != 'blocks', 'another one, because this one uses no labels')
        resumed = self.run.resume
        require('run.resume', resumed, resumed in (None, 'auto'), 'auto or null, because each stage is a run')
        # Their values are checked before the first stage.
        self.stages()

    def stages(self) -> dict[str, Config]:
        """Return the experiments of the stages by name, in their order; each is one of train.imagenet."""
        section, stages = self.convert, {}
        if section.blocks_epochs:
            stages['blocks'] = self._unlabelled(section.blocks_epochs, section.blocks_lr, kind='blocks')
        if section.features_epochs:
            only: dict[str, Any] = dict(kind='feature', task_loss_weight=0.0, distill_loss_weight=1.0)
            stages['features'] = self._unlabelled(section.features_epochs, section.features_lr, **only)
        if section.fine_tune != 'none':
            stages['labels'] = self._stage(distill=self.distill if section.fine_tune == 'distill' else DistillConfig())
        return stages

    def _unlabelled(self, epochs: int, lr: float, **distill: Any) -> Config:
        peak = peak_rate(lr, self.data.batch_size)
        lowest = {name: min(getattr(self.schedule, name), peak) for name in ('warmup_lr', 'min_lr')}
        taught: dict[str, Any] = {'task_loss_weight': None, 'distill_loss_weight': None, 'temperature': 1.0, **distill}
        return self._stage(
            optim=dataclasses.replace(self.optim, lr=lr),
            schedule=dataclasses.replace(self.schedule, epochs=epochs, warmup_epochs=0, step='update', **lowest),
            distill=dataclasses.replace(self.distill, **taught),
            regularize=RegularizeConfig(),
        )

    def _stage(self, **sections: Any) -> Config:
        kept = {each.name: getattr(self, each.name) for each in dataclasses.fields(Config)}
        return Config(**{**kept, **sections})
