"""The initial weights of a linear map, by its width or by a standard deviation."""

import math

from torch import Tensor
from transformers import initialization as init


def draw_weights(weight: Tensor, std: float | None, fan_in: int, fan_out: int) -> None:
    """Draw the weights of a linear map in place, unless transformers has loaded them.

    Args:
        weight: A weight of any shape; the weight of several heads holds one map for each.
        std: Standard deviation of a normal distribution; None: Glorot's uniform distribution, with which the outputs
            have about the variance of the inputs at any width.
        fan_in, fan_out: Inputs and outputs of the map, of one head where it has several.
    """
    if std is None:
        bound = math.sqrt(6 / (fan_in + fan_out))
        init.uniform_(weight, -bound, bound)
    else:
        init.normal_(weight, std=std)
