"""Export of trained models: a hub folder, torch.export, ONNX and a page for browsers."""

from aft_vision.export.hub import export_hub_folder, export_model, model_card
from aft_vision.export.program import choose_shape, describe_input, export_onnx, export_pt2
from aft_vision.export.quantize import INT8_MODES, quantize_onnx
from aft_vision.export.verify import Check, InputShape
from aft_vision.export.web import export_web
