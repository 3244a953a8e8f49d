"""Distillation of the blocks of a ViT: timm's task of features, for every block."""

from typing import Any

from timm.task import FeatureDistillationTask
from timm.task.distillation import FeatureDistillationTrainableModule
from timm.utils import unwrap_model
from torch import Tensor, nn

from aft_vision.models.block_alignment import block_errors, block_tokens, pair_models


class AlignedBlocks(FeatureDistillationTrainableModule):
    """The student, called with the tokens of a teacher's blocks."""

    def forward(  # type: ignore[override]
        self, tokens: list[Tensor], pairs: list[range], grid: tuple[int, int]
    ) -> Tensor:
        """Return the mean error of the blocks, as `block_errors` defines it."""
        return block_errors(self.student, tokens, pairs, grid).mean()


class BlockAlignmentTask(FeatureDistillationTask):
    """Training of each block on the input and the output of the teacher's, without labels; the rest is frozen.

    Args:
        student_model: An AFTVisionTransformer.
        kwargs: Arguments of timm's FeatureDistillationTask.

    Raises:
        ValueError: student or teacher is not a vision transformer, or the teacher has fewer blocks.
    """

    def __init__(self, student_model: nn.Module, **kwargs: Any) -> None:
        super().__init__(student_model, **kwargs)
        student: Any = student_model
        self.pairs = pair_models(student, unwrap_model(self.teacher.model))
        student.requires_grad_(False).blocks.requires_grad_(True)
        self.trainable_module = AlignedBlocks(student_model)

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return the error as `loss`; the targets are not used."""
        student: Any = self.get_eval_model()
        mean: Any = self.student_mean
        std: Any = self.student_std
        images = self.teacher.normalize_input(input, mean, std)
        tokens = block_tokens(self.teacher.model, images)
        grid = unwrap_model(student).patch_embed.dynamic_feat_size(input.shape[-2:])
        return {'loss': self.trainable_module(tokens, self.pairs, grid)}
